"""Orbax checkpoints of JAX runs, in the folders and with the promises of checkpoint.py.

RUN/checkpoints/step_00000050/ holds `orbax/` (weights, moments, FP8 state; any mesh reads it) and state.json. It is written
into a hidden folder, forced to disk, then renamed: a folder with a step name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from te_plugin.training.checkpoint import CHECKPOINT_DIR, STATE_FILE, Checkpoint, CheckpointError

TREE = "orbax"
FORMAT = "orbax-1"
_NAME = re.compile(r"step_(\d{8,})")


def list_checkpoints(run_dir: Path | str) -> list[Checkpoint]:
    """Complete Orbax checkpoints of a run, oldest first."""
    folder, found = Path(run_dir) / CHECKPOINT_DIR, []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / STATE_FILE).is_file() and (path / TREE).is_dir():
            found.append(
                Checkpoint(path, int(match.group(1)), json.loads((path / STATE_FILE).read_text(encoding="utf-8")))
            )
    return sorted(found, key=lambda c: c.step)


def latest(run_dir: Path | str) -> Checkpoint | None:
    """The newest one. CheckpointError when the run has checkpoints of another framework only."""
    found = list_checkpoints(run_dir)
    if found:
        return found[-1]
    folder = Path(run_dir) / CHECKPOINT_DIR
    other = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []
    if other:
        raise CheckpointError(
            f"{folder} holds {other[-1]}, which another adapter wrote: a run continues with the adapter it began with"
        )
    return None


def save(run_dir: Path | str, step: int, tree: Any, info: Mapping[str, Any], keep: int) -> Path:
    """Write checkpoint `step`, then remove all but the newest `keep`. CheckpointError when it cannot be written."""
    import orbax.checkpoint as ocp

    folder = Path(run_dir) / CHECKPOINT_DIR
    final, temporary = folder / f"step_{step:08d}", folder / f".step_{step:08d}.tmp"
    if (final / STATE_FILE).is_file():
        return final
    try:
        for stale in folder.glob(".step_*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir(parents=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((temporary / TREE).absolute(), tree)
            checkpointer.wait_until_finished()
        _write_synced(temporary / STATE_FILE, json.dumps({**info, "format": FORMAT, "step": step}, indent=1) + "\n")
        _sync_tree(temporary)
        os.rename(temporary, final)
        _sync(folder)
    except (OSError, ValueError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        older = list_checkpoints(run_dir)
        kept = f"checkpoint of step {older[-1].step} is intact" if older else "there is no older checkpoint"
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {folder}: {error}; {kept} and every row is in "
            f"metrics.jsonl. Free space, then continue with run.resume=true"
        ) from error
    for old in list_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old.path)
    return final


def load(checkpoint: Checkpoint, like: Any) -> Any:
    """The stored tree with the shapes, dtypes and shardings of `like`. CheckpointError when it does not fit."""
    import orbax.checkpoint as ocp

    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore((checkpoint.path / TREE).absolute(), wanted)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint.path} does not fit this run: {error}") from error


def _sync_tree(folder: Path) -> None:
    """Force every file of a folder to disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
