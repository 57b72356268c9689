"""Tracker: every row goes to metrics.jsonl first; wandb, where asked for, mirrors it.

One Tracker per process, one run per run directory: only global rank 0 writes anything. A failing wandb is reported once,
noted in RUN/tracking.json, and never stops training or loses a row; `sync(run_dir)` replays the rows later.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from te_plugin.training.metrics import METRICS_FILE, MetricsFile, read_metrics
from te_plugin.training.progress import say
from te_plugin.training.wandb_sink import RunIdentity, TrackingError, WandbSink, wandb_installed

MODES = ("auto", "jsonl", "wandb", "wandb_offline")
TRACKING_FILE = "tracking.json"


def global_rank() -> int:
    """The rank over all nodes as torchrun and Slurm launchers set it. LOCAL_RANK is per node and would give one run a node."""
    return int(os.environ.get("RANK", "0"))


def resolve_mode(mode: str) -> str:
    """auto becomes wandb_offline where wandb is installed, else jsonl. Asking for a missing wandb is an error."""
    if mode not in MODES:
        raise TrackingError(f"track.mode={mode!r} is unknown; use one of {', '.join(MODES)}")
    if mode == "auto":
        return "wandb_offline" if wandb_installed() else "jsonl"
    if mode != "jsonl" and not wandb_installed():
        raise TrackingError(
            f"track.mode={mode} needs wandb, which is not installed: pip install te_plugin[wandb], or track.mode=jsonl"
        )
    return mode


class Tracker:
    """Logs the rows of one run.

    run_dir: where metrics.jsonl and tracking.json live. mode: jsonl | wandb | wandb_offline | auto. run_id: taken from
    tracking.json, else from this argument (the checkpoint's), else new. rank: global rank (default: RANK); any rank but 0
    does nothing. warn: where one-line warnings go.
    """

    def __init__(
        self,
        run_dir: Path | str,
        mode: str = "jsonl",
        *,
        project: str = "te_plugin",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        job_type: str = "train",
        tags: Sequence[str] = (),
        run_id: str | None = None,
        rank: int | None = None,
        timeout_s: float = 30.0,
        warn: Callable[[str], None] | None = None,
    ):
        self.mode = resolve_mode(mode)
        self.run_dir = Path(run_dir)
        self.active = (global_rank() if rank is None else rank) == 0
        self.error: str | None = None
        self._warn = warn or (lambda text: say(text, sys.stderr))
        self._timeout_s = timeout_s
        self._sink: WandbSink | None = None
        self._started = False
        self._config: dict[str, Any] = {}
        self._changes: dict[str, list[Any]] = {}
        if not self.active:
            self.identity = RunIdentity(run_id or "", project)
            return
        self.metrics = MetricsFile(self.run_dir)
        saved = self._load_state()
        self._config, self._changes = saved.get("config", {}), saved.get("changes", {})
        known_id = saved.get("identity", {}).get("run_id")
        self.identity = RunIdentity(
            known_id or run_id or secrets.token_hex(4), project, entity, name, group, job_type, tuple(tags)
        )
        self._save_state()

    @property
    def run_id(self) -> str:
        return self.identity.run_id

    @property
    def changes(self) -> dict[str, list[Any]]:
        """Config values that differ between starts of this run: key -> [first value, next value, ...]."""
        return dict(self._changes)

    def config(self, values: Mapping[str, Any]) -> None:
        """Record the configuration. A key whose value differs from the last start keeps both values in `changes`."""
        if not self.active:
            return
        flat = _flatten(values)
        for key in sorted(set(flat) & set(self._config)):
            if flat[key] != self._config[key]:
                self._changes.setdefault(key, [self._config[key]]).append(flat[key])
        self._config = {**self._config, **flat}
        self._save_state()
        if self._sink is not None:
            self._guard(lambda: self._sink.update_config(self._wandb_config()))

    def resume(self, step: int) -> None:
        """The next row logged will be `step`: rows from there on belong to work that was lost and are dropped."""
        if not self.active:
            return
        if (
            self._sink is not None
        ):  # same process restarts from an older checkpoint: the mirror starts again from the file
            self._guard(lambda: self._sink.finish(0))
            self._sink = None
        self._started = False
        self.metrics.rewind(step)

    def log(self, row: Mapping[str, Any]) -> None:
        """One row: numbers by key, with an integer "step" above the last one (MetricsError otherwise, nothing is dropped)."""
        if not self.active:
            return
        if not self._started:
            self._start()
        self.metrics.append(row)
        if self._sink is not None:
            self._guard(lambda: self._sink.log(row))

    def sync_to_disk(self) -> None:
        if self.active:
            self.metrics.sync()

    def finish(self, exit_code: int = 0) -> None:
        if not self.active:
            return
        if self._sink is not None:
            self._guard(lambda: self._sink.finish(exit_code))
            self._sink = None
        try:
            self.metrics.close()
            self._save_state()
        except OSError as error:  # the disk is full: how the run ended is said by its verdict, not by this
            self._warn(f"{self.run_dir} could not be completed: {error}")

    def _start(self) -> None:
        self._started = True
        if self.mode == "jsonl":
            return
        rows = read_metrics(self.metrics.path) if self.metrics.path.exists() else []
        offline = self.mode == "wandb_offline"

        def open_sink():
            self._sink = WandbSink(self.run_dir, self.identity, offline, self._wandb_config(), rows, self._timeout_s)

        self._guard(open_sink)
        self._save_state()

    def _wandb_config(self) -> dict[str, Any]:
        return {**self._config, "resume_changes": self._changes} if self._changes else dict(self._config)

    def _guard(self, call: Callable[[], None]) -> None:
        """Run a wandb call. Whatever it raises, training goes on and metrics.jsonl stays complete."""
        try:
            call()
        except Exception as error:  # nothing is computed here: wandb raises its own, network and service errors
            self._sink = None
            self.error = f"{type(error).__name__}: {error}"
            self._warn(
                f"wandb stopped working ({self.error}); training goes on, every row is in {self.metrics.path}. "
                f"Send them later with: te-plugin sync {self.run_dir}"
            )
            self._save_state()

    def _load_state(self) -> dict[str, Any]:
        path = self.run_dir / TRACKING_FILE
        return read_tracking(path) if path.exists() else {}

    def _save_state(self) -> None:
        state = {
            "mode": self.mode,
            "identity": self.identity.to_json(),
            "config": self._config,
            "changes": self._changes,
            "wandb_error": self.error,
        }
        temporary = self.run_dir / (TRACKING_FILE + ".tmp")
        temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.run_dir / TRACKING_FILE)


def read_tracking(path: Path) -> dict[str, Any]:
    """What tracking.json holds; TrackingError for a damaged one."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        RunIdentity.from_json(state["identity"])
        return {"config": {}, "changes": {}, **state}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(f"{path} cannot be read ({error}); remove it: the run keeps the id of its checkpoint") from error


def sync(run_dir: Path | str, mode: str = "wandb", timeout_s: float = 60.0) -> int:
    """Replay a run directory into wandb under its own run id; returns the number of rows. TrackingError with the reason."""
    run_dir = Path(run_dir)
    state_file = run_dir / TRACKING_FILE
    if not state_file.exists():
        raise TrackingError(f"{run_dir} is not a run directory: it has no {TRACKING_FILE}")
    if resolve_mode(mode) == "jsonl":
        raise TrackingError("sync sends rows to wandb, which is not installed: pip install te_plugin[wandb]")
    state = read_tracking(state_file)
    if not (run_dir / METRICS_FILE).exists():
        raise TrackingError(f"{run_dir} has no {METRICS_FILE}: there are no rows to send")
    rows = read_metrics(run_dir)
    config = {**state["config"], **({"resume_changes": state["changes"]} if state["changes"] else {})}
    try:
        sink = WandbSink(
            run_dir, RunIdentity.from_json(state["identity"]), mode == "wandb_offline", config, rows, timeout_s
        )
        sink.finish(0)
    except Exception as error:  # wandb's own, network and service errors
        raise TrackingError(
            f"wandb did not take the {len(rows)} rows of {run_dir}: {type(error).__name__}: {error}"
        ) from error
    return len(rows)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flatten(value, name + "."))
        else:
            flat[name] = value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
    return flat
