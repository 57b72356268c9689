"""The directory of a run: made once, written by one job at a time, its configuration replaced in one step.

RUN/lock is held (flock) for as long as a job writes the directory, and names its host and process. The lock goes with the
process, so a killed run leaves none behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from te_plugin.config import Config, to_yaml
from te_plugin.convergence.verdict import VERDICT_FILE
from te_plugin.training.metrics import METRICS_FILE
from te_plugin.training.progress import say

if TYPE_CHECKING:
    from te_plugin.training.distributed import World

CONFIG_FILE = "config.resolved.yaml"
LOCK_FILE = "lock"


class RunDirError(ValueError):
    """The run directory cannot be used as asked."""


@contextlib.contextmanager
def held(cfg: Config, run_dir: Path, world: World) -> Iterator[None]:
    """Around a run, on every rank: rank 0 makes the folder, holds it and writes config.resolved.yaml. No run is overwritten.

    RunDirError, on every rank, when another job writes the folder, when it has a run that this one does not continue, or when it
    cannot be written.
    """
    with contextlib.ExitStack() as until_the_end:
        problem = world.broadcast_object(_claim(cfg, run_dir, until_the_end) if world.is_main else None)
        if problem:
            raise RunDirError(problem)
        yield


@contextlib.contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """A directory that cannot be written is the user's to repair: RunDirError names it."""
    try:
        yield
    except OSError as error:
        raise RunDirError(f"the run directory {run_dir} cannot be written: {error}") from error


def holder(run_dir: Path) -> str | None:
    """The job that writes the folder now, in words; None when there is none."""
    try:
        with open(run_dir / LOCK_FILE, "r+", encoding="utf-8") as file:  # NFS locks only what is open for writing
            return None if _locked(file) else file.read().strip() or "another process"
    except OSError:
        return None


def in_use(run_dir: Path, by: str) -> str:
    return f"{run_dir} is being written by {by}: wait until that run has ended, or stop it"


def write_config(path: Path, cfg: Config) -> None:
    """Replace a configuration file in one step: a reader sees the old text or the new one, never half."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(to_yaml(cfg), encoding="utf-8")
    os.replace(temporary, path)


def _claim(cfg: Config, run_dir: Path, until_the_end: contextlib.ExitStack) -> str | None:
    """Why the folder cannot be had; None when it is ours."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = until_the_end.enter_context(open(run_dir / LOCK_FILE, "a+", encoding="utf-8"))
        if not _locked(file):
            file.seek(0)
            return in_use(run_dir, file.read().strip() or "another process")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        used = [name for name in (METRICS_FILE, VERDICT_FILE) if (run_dir / name).exists()]
        if used and not cfg.run.resume:
            return f"{run_dir} already holds a run ({', '.join(used)}); continue it with run.resume=true or change run.dir"
        write_config(run_dir / CONFIG_FILE, cfg)
    except OSError as error:
        return f"run directory {run_dir} cannot be written: {error}"
    return None


def _locked(file) -> bool:
    """Take the lock until the file is closed; False when somebody else has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        say(f"{file.name} cannot be locked ({error.strerror}): nothing keeps a second run out of this directory", sys.stderr)
    return True
