"""Look at this installation: versions, compiled libraries, the machine, and a self-check of every backend on tiny inputs
against the float64 oracle. Works without a GPU and without the optional packages. Exit code 1 when something is broken.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from argparse import Namespace

from rich import box
from rich.table import Table
from rich.text import Text

from te_plugin import __version__, ffi, paths, selfcheck, tuning
from te_plugin.commands.report import console

HELP = "versions, libraries, and a self-check of every backend"
EXAMPLES = """examples:
  te-plugin doctor"""

# package -> what it is for; those of REQUIRED must be there.
REQUIRED = {"numpy": "arrays", "apache-tvm-ffi": "calls the compiled libraries", "hydra-core": "configuration",
            "omegaconf": "configuration", "rich": "tables", "matplotlib": "pictures"}
OPTIONAL = {"torch": "extra torch", "megatron-core": "extra megatron", "jax": "extra jax", "jax-tvm-ffi": "extra jax",
            "maxtext": "extra maxtext", "nvidia-cudnn-frontend": "extra cudnn, attention on Hopper", "wandb": "extra wandb",
            "tiktoken": "extra llama3", "llama-models": "extra llama3", "pyarrow": "extra data",
            "triton": "portable GPU kernels", "transformer_engine": "not used; a peer in benchmarks"}


def add_arguments(parser) -> None:
    pass


def run(args: Namespace) -> int:
    out, failures = console(), []
    out.print(f"te_plugin {__version__}, Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs")
    out.print(_versions(failures))
    out.print(_libraries(failures))
    out.print(_checks(failures))
    for failure in failures:
        out.print(Text("problem", style="bold red"), f": {failure}", sep="")
    out.print("doctor: all is well" if not failures else f"doctor: {len(failures)} problem{'s' if len(failures) > 1 else ''}")
    return 1 if failures else 0


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _versions(failures: list[str]) -> Table:
    table = _table("packages", "package", "version", "for")
    for name, purpose in {**REQUIRED, **OPTIONAL}.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
            if name in REQUIRED:
                failures.append(f"the package {name} is missing ({purpose}); install te_plugin again: pip install te_plugin")
        table.add_row(name, version, purpose)
    return table


def _libraries(failures: list[str]) -> Table:
    table = _table("this machine", "what", "state")
    for name in ffi.LIBRARIES:
        try:
            state = "not built (optional)"
            if ffi.is_built(name):
                ffi.load(name)
                state = ffi.function(name, "build_info")() if ffi.exports(name, "build_info") else "built, and loads"
        except ffi.LibraryError as error:
            state = f"broken: {error}"
            failures.append(str(error))
        if name == "cpu" and not ffi.is_built(name):
            state = "missing"
            failures.append(f"the cpu library is not at {ffi.library_path(name)}; install te_plugin again, or build it: make cpu")
        table.add_row(f"library {name}", str(state))
    for what, find in (("configs", paths.configs_dir), ("recipes", paths.recipes_dir)):
        try:
            table.add_row(what, str(find()))
        except FileNotFoundError as error:
            table.add_row(what, "missing")
            failures.append(str(error))
    table.add_row("GPUs", _gpus())
    table.add_row("measured kernel choices (run.tune)", _tuning())
    return table


def _tuning() -> str:
    """Where choices between kernels are kept, and how many each file holds."""
    try:
        folder = tuning.cache_folder()
    except RuntimeError as error:  # a user without a home directory
        return f"none: {error}"
    found = [f"{path.name}: {tuning.describe(path)}" for path in sorted(folder.glob("*.json"))]
    return f"{folder}" + (f" ({'; '.join(found)})" if found else " (none yet)")


def _gpus() -> str:
    if importlib.util.find_spec("torch") is None:
        return "not looked for: torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "none that torch sees"
    names = [f"{torch.cuda.get_device_name(i)} (compute capability {'.'.join(map(str, torch.cuda.get_device_capability(i)))})"
             for i in range(torch.cuda.device_count())]
    return ", ".join(names)


def _checks(failures: list[str]) -> Table:
    table = _table("self-check against the float64 oracle", "backend", "check", "largest relative error", "bound", "result")
    for outcome in selfcheck.run_all():
        error = "-" if outcome.error is None else f"{outcome.error:.2e}"
        table.add_row(outcome.backend, outcome.check, error, f"{outcome.bound:.0e}" if outcome.bound else "exact",
                      "ok" if outcome.ok else Text("FAILED", style="bold red"))
        if not outcome.ok:
            why = outcome.problem or f"relative error {outcome.error:.2e} is above {outcome.bound:.0e}"
            failures.append(f"{outcome.backend}, {outcome.check}: {why}")
    return table
