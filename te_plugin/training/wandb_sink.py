"""wandb as a mirror of metrics.jsonl: one wandb run per run directory, and a reader that proves it holds the same rows.

Every row is logged without an explicit wandb step, so wandb's own counter is the row number and can never go backwards (wandb
drops rows whose step is lower than its last one). The x axis is "train/tokens".

Offline: a resumed run starts a new offline folder with the same run id and replays metrics.jsonl into it; the older folder is
renamed to superseded-*, so exactly one offline folder exists and it holds exactly the rows of metrics.jsonl.
Online: the server says how many rows it has; the ones it lacks (lost in the crash) are replayed first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from te_plugin.training.metrics import decode, encode

STEP_METRIC = "train/tokens"
SUPERSEDED = "superseded-"


class TrackingError(RuntimeError):
    """Tracking cannot be set up, or a recorded run cannot be read. Rows already in metrics.jsonl are safe."""


@dataclass(frozen=True)
class RunIdentity:
    """What wandb shows about a run. The id stays the same over restarts."""

    run_id: str
    project: str = "te_plugin"
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    job_type: str = "train"
    tags: tuple[str, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tags": list(self.tags)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunIdentity:
        return cls(**{**data, "tags": tuple(data["tags"])})


class WandbSink:
    """An open wandb run. Every method may raise whatever wandb raises; the Tracker decides what that means."""

    def __init__(
        self,
        run_dir: Path,
        identity: RunIdentity,
        offline: bool,
        config: Mapping[str, Any],
        rows: Iterable[Mapping[str, Any]],
        timeout_s: float = 30.0,
    ):
        import wandb

        if offline:
            _set_older_runs_aside(run_dir)
        self.run = wandb.init(
            project=identity.project,
            entity=identity.entity,
            name=identity.name,
            group=identity.group,
            job_type=identity.job_type,
            tags=list(identity.tags),
            id=identity.run_id,
            dir=str(run_dir),
            mode="offline" if offline else "online",
            resume=None if offline else "allow",
            config=dict(config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=timeout_s,
                finish_timeout=10 * timeout_s,
                x_disable_stats=True,
                x_save_requirements=False,
                disable_code=True,
                disable_git=True,
            ),
        )
        self.run.define_metric(STEP_METRIC)
        self.run.define_metric("*", step_metric=STEP_METRIC)
        rows = list(rows)
        known = 0 if offline else min(int(self.run.step), len(rows))
        for row in rows[known:]:
            self.log(row)

    def log(self, row: Mapping[str, Any]) -> None:
        self.run.log(dict(row))

    def update_config(self, values: Mapping[str, Any]) -> None:
        self.run.config.update(dict(values), allow_val_change=True)

    def finish(self, exit_code: int = 0) -> None:
        self.run.finish(exit_code=exit_code)


def wandb_installed() -> bool:
    import importlib.util

    if "wandb" in sys.modules:
        return sys.modules["wandb"] is not None
    found = importlib.util.find_spec("wandb")
    return found is not None and found.origin is not None  # a folder of runs named wandb is found too, and is no package


def offline_runs(run_dir: Path | str) -> list[Path]:
    """The .wandb files of the run directory's offline runs, oldest first."""
    return sorted(Path(run_dir).glob("wandb/offline-run-*/run-*.wandb"))


def _set_older_runs_aside(run_dir: Path) -> None:
    for file in offline_runs(run_dir):
        folder = file.parent
        target = folder.with_name(SUPERSEDED + folder.name)
        count = 1
        while target.exists():
            count += 1
            target = folder.with_name(f"{SUPERSEDED}{count}-{folder.name}")
        os.rename(folder, target)


def read_wandb_rows(file: Path | str) -> list[dict[str, Any]]:
    """The history rows in a .wandb file, read by wandb's own reader (`wandb leet inspect`, wandb >= 0.31).

    wandb's private keys (_step, _timestamp, _runtime) are left out. TrackingError when wandb cannot read the file.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "WANDB_MODE": "offline"})
    if result.returncode != 0:
        raise TrackingError(f"wandb could not read {file}: {result.stderr.strip() or result.stdout.strip()}")
    rows = []
    for line in result.stdout.splitlines():
        record = json.loads(line)
        if record.get("type") == "history":
            item = record["history"]["item"]
            rows.append({key: decode(value) for key, value in item.items() if not key.startswith("_")})
    return rows


def differences(run_dir: Path | str) -> list[str]:
    """Where the offline wandb run differs from metrics.jsonl; empty when every row and value is equal."""
    from te_plugin.training.metrics import read_metrics

    files = offline_runs(run_dir)
    if len(files) != 1:
        return [f"expected one offline wandb run in {run_dir}, found {len(files)}"]
    ours, theirs = read_metrics(run_dir), read_wandb_rows(files[0])
    found = []
    if len(ours) != len(theirs):
        found.append(f"metrics.jsonl has {len(ours)} rows, wandb has {len(theirs)}")
    for a, b in zip(ours, theirs, strict=False):
        for key in sorted(set(a) | set(b)):
            if encode(a.get(key)) != encode(b.get(key)):
                found.append(f"step {a['step']}: {key} is {a.get(key)!r} in metrics.jsonl and {b.get(key)!r} in wandb")
    return found
