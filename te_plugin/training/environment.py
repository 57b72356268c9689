"""env.json: what a run ran on and with, as far as it can matter for its numbers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "te_plugin",
    "torch",
    "triton",
    "megatron-core",
    "maxtext",
    "jax",
    "numpy",
    "apache-tvm-ffi",
    "jax-tvm-ffi",
    "hydra-core",
    "wandb",
    "pyarrow",
)


def versions() -> dict[str, str]:
    """Installed versions of what can change a run's numbers or files."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the source tree this package runs from, with -dirty; None when it is installed from a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:

        def run(*words: str) -> str:
            return subprocess.run(
                ("git", "-C", str(root), *words), capture_output=True, text=True, check=True
            ).stdout.strip()

        return run("rev-parse", "HEAD") + ("-dirty" if run("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def describe(device: torch.device, world_size: int) -> dict[str, Any]:
    """Hardware, software and process layout of this run."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else []
    return {
        "device": device.type,
        "gpus": gpus,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "world_size": world_size,
        "versions": versions(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "git": git_commit(),
    }


def write_json(path: Path, data: Any) -> None:
    """Written beside and renamed, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
