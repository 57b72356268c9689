"""Checkpoints: torch.distributed.checkpoint folders, written atomically, read strictly.

RUN/checkpoints/step_00000050/ holds the tensors (any number of ranks, any sharding, so ddp, fsdp2 and single read each other's)
and state.json (step, run id, layout). A checkpoint is written into a hidden folder, forced to disk, then renamed: a folder
with a step name is complete, and a crash or a full disk leaves the older ones as they were. Only tensors are stored; FP8 state
is tensors too, and a module that wants to store anything else is refused.

Keys: model/<name> FP32 weights, exp_avg/ and exp_avg_sq/<name> Adam's moments, state/<name> FP8 scaling state, rng/<rank>.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from te_plugin.training.distributed import World
from te_plugin.training.progress import say

CHECKPOINT_DIR = "checkpoints"
STATE_FILE = "state.json"
FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message says which, why, and what is still there."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    info: Mapping[str, Any]


def list_checkpoints(folder: Path | str) -> list[Checkpoint]:
    """Complete checkpoints in a checkpoints folder, oldest first. Unfinished ones are ignored."""
    found = []
    folder = Path(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / STATE_FILE).is_file() and (path / ".metadata").is_file():
            found.append(Checkpoint(path, int(match.group(1)), _read_state(path)))
    return sorted(found, key=lambda c: c.step)


def latest(run_dir: Path | str) -> Checkpoint | None:
    found = list_checkpoints(Path(run_dir) / CHECKPOINT_DIR)
    return found[-1] if found else None


def find(path: Path | str) -> Checkpoint:
    """The checkpoint meant by a path: a checkpoint folder, a checkpoints folder or a run directory (its latest)."""
    path = Path(path)
    if (path / STATE_FILE).is_file():
        info = _read_state(path)
        return Checkpoint(path, int(info["step"]), info)
    found = list_checkpoints(path) or list_checkpoints(path / CHECKPOINT_DIR)
    if not found:
        raise CheckpointError(
            f"no complete checkpoint at {path}: expected a folder with {STATE_FILE}, or a run directory"
        )
    return found[-1]


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or type(state.get("step")) is not int:
            raise ValueError("it does not say its step")
        return state
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path / STATE_FILE} cannot be read ({error}): the checkpoint is damaged; remove {path} to go on from an older one"
        ) from error


def save(
    run_dir: Path | str,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    info: Mapping[str, Any],
    world: World,
    keep: int = 2,
) -> Path:
    """Write checkpoint `step`, then remove all but the newest `keep`. Every rank calls it and gets the CheckpointError of any."""
    folder = Path(run_dir) / CHECKPOINT_DIR
    final, temporary = folder / f"step_{step:08d}", folder / f".step_{step:08d}.tmp"
    if world.broadcast_object((final / STATE_FILE).is_file() if world.is_main else None):
        return final

    def prepare():
        if world.is_main:
            _remove_unfinished(folder)
            temporary.mkdir(parents=True)

    def write():
        writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
        with _quiet():
            dcp.save(_under_tp(tensors, world), storage_writer=writer, no_dist=world.size == 1)

    def publish():
        if world.is_main:
            state = {**info, "format": FORMAT_VERSION, "step": step, "tensor_parallel": world.tp_size}
            _write_synced(temporary / STATE_FILE, json.dumps(state, indent=1) + "\n")
            _sync_dir(temporary)
            shutil.rmtree(final, ignore_errors=True)  # what lies there is incomplete: a complete one is not written again
            os.rename(temporary, final)
            _sync_dir(folder)

    for stage in (prepare, write, publish):
        reason = _run_stage(stage, world)
        if reason is not None:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(_save_message(folder, step, tensors, reason))
    if world.is_main:
        _remove_older(folder, keep)
    world.barrier()
    return final


def _remove_older(folder: Path, keep: int) -> None:
    """All but the newest `keep`. What cannot be removed (a file that is held open on NFS, say) stays, and training goes on."""
    try:
        for old in list_checkpoints(folder)[:-keep]:
            going = folder / f".{old.path.name}.tmp"  # a half-removed folder must not be taken for a checkpoint
            os.rename(old.path, going)
            shutil.rmtree(going)
    except (OSError, CheckpointError) as error:
        say(f"older checkpoints cannot be removed: {error}", sys.stderr)


def _run_stage(stage, world: World) -> str | None:
    """Run one stage on every rank; when it fails on any, every rank learns it and none waits for the others."""
    reason = None
    try:
        stage()
    except (OSError, CheckpointException, RuntimeError) as error:
        reason = _cause(error)
    failed = torch.tensor([0.0 if reason is None else 1.0], device=world.device)
    if float(world.sum_all(failed)) == 0:
        return None
    return reason or "another process failed (its own message says why)"


def load(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Fill `tensors` in place. CheckpointError lists every name that is missing or left over."""
    reader = dcp.FileSystemReader(checkpoint.path)
    wanted = _under_tp(tensors, world)
    stored = _stored(checkpoint)
    written_tp = checkpoint.info.get("tensor_parallel", 1)
    if written_tp != world.tp_size:
        raise CheckpointError(
            f"{checkpoint.path} was written with tensor_parallel={written_tp} and this run has {world.tp_size}: weights of "
            f"tensor-parallel ranks are stored as they are split; set parallel.tensor_parallel={written_tp}"
        )
    missing = sorted(set(wanted) - set(stored))
    sections = {name.split("/", 1)[0] for name in tensors} | {"model"}
    mine = _under_tp({name: None for name in sections}, world)
    unexpected = sorted(k for k in stored if any(k.startswith(prefix + "/") for prefix in mine) and k not in wanted)
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model; missing from it: {', '.join(missing) or 'nothing'}; "
            f"in it but not in the model: {', '.join(unexpected) or 'nothing'}"
        )
    for name, tensor in wanted.items():
        if tuple(stored[name].size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {tuple(stored[name].size)}, the model's is {tuple(tensor.shape)}"
            )
    try:
        with _quiet():
            dcp.load(wanted, storage_reader=reader, no_dist=world.size == 1)
    except (OSError, CheckpointException, RuntimeError) as caught:
        raise CheckpointError(
            f"{checkpoint.path} cannot be read: {_cause(caught)}; remove that folder to go on from an older checkpoint"
        ) from caught


def _stored(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Names and shapes of everything in a checkpoint."""
    try:
        return dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise CheckpointError(f"{checkpoint.path} cannot be read: its .metadata is damaged ({error})") from error


def stored_shapes(checkpoint: Checkpoint, section: str, world: World) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names (without their section), shapes and dtypes that a checkpoint holds under a section such as "state"."""
    prefix = next(iter(_under_tp({f"{section}/": None}, world)))
    stored = _stored(checkpoint)
    return {
        name[len(prefix) :]: (tuple(meta.size), meta.properties.dtype)
        for name, meta in stored.items()
        if name.startswith(prefix)
    }


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """FP8 scaling state and other persistent buffers: everything in the state dict that is not a parameter."""
    parameters = {name for name, _ in model.named_parameters()}
    found = {}
    for name, value in model.state_dict().items():
        if name in parameters or value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name} is {type(value).__name__}: only tensors are stored, FP8 state must be tensors"
            )
        if value.numel():
            found[f"state/{name}"] = value
    return found


def load_model_state(model: nn.Module, checkpoint: Checkpoint, world: World) -> list[str]:
    """Restore FP8 state; returns the names of the model's state that the checkpoint lacks (a checkpoint of another precision).

    Shapes may differ from the model's (another amax history length): the module's own loading rule decides what is kept.
    """
    stored = stored_shapes(checkpoint, "state", world)
    own = {name.split("/", 1)[1] for name in model_state(model)}
    common = sorted(own & set(stored))
    if common:
        values = {
            f"state/{name}": torch.empty(stored[name][0], dtype=stored[name][1], device=world.device) for name in common
        }
        read_tensors(checkpoint, values, world)
        result = model.load_state_dict({name: values[f"state/{name}"] for name in common}, strict=False)
        if result.unexpected_keys:
            raise CheckpointError(f"{checkpoint.path}: the model refused {', '.join(result.unexpected_keys)}")
    return sorted(own - set(stored))


def save_weights(path: Path | str, weights: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> Path:
    """A checkpoint of weights only (for run.init_from), by the model's parameter names. One process."""
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path} exists already; choose another folder")
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        tensors = {f"model/{name}": tensor.detach().float().contiguous() for name, tensor in weights.items()}
        with _quiet():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary, sync_files=True), no_dist=True)
        state = {**info, "format": FORMAT_VERSION, "step": 0, "tensor_parallel": 1, "kind": "weights"}
        _write_synced(temporary / STATE_FILE, json.dumps(state, indent=1) + "\n")
        os.rename(temporary, path)
    except (OSError, CheckpointException) as caught:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"weights could not be written to {path}: {_cause(caught)}") from caught
    return path


def _under_tp(tensors: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Tensor-parallel ranks hold different tensors under one name: theirs get the rank as a prefix."""
    prefix = "" if world.tp_size == 1 else f"tp{world.tp_rank}of{world.tp_size}/"
    return {prefix + name: tensor for name, tensor in tensors.items()}


@contextlib.contextmanager
def _quiet():
    """DCP warns that it saves from one process whenever it does; that is what a run of one process wants."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(".step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _save_message(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], reason: str) -> str:
    need = sum(t.numel() * t.element_size() for t in tensors.values())
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    older = list_checkpoints(folder)
    kept = f"checkpoint of step {older[-1].step} is intact" if older else "there is no older checkpoint"
    return (
        f"checkpoint of step {step} could not be written to {folder}: {reason} (needs about {need / 2**20:.0f} MiB, "
        f"{free / 2**20:.0f} MiB free); {kept} and every row is in metrics.jsonl. "
        f"{'Free space' if free < need else 'Remove the cause'}, then continue with run.resume=true"
    )


def _cause(error: BaseException) -> str:
    """The innermost message: DCP wraps the operating system's error of each rank."""
    if isinstance(error, CheckpointException) and error.failures:
        wrapped = next(iter(error.failures.values()))
        error = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__
    return str(error) or type(error).__name__


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_tensors(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Fill tensors by name, with no claim about what else the checkpoint holds. Every rank calls it, with its own names."""
    with _quiet():
        dcp.load(
            _under_tp(tensors, world), storage_reader=dcp.FileSystemReader(checkpoint.path), no_dist=world.size == 1
        )
