"""What the loop asks of a model that trains: steps, evaluations, checkpoints. Rows, schedule and verdicts are the loop's.

`TorchEngine` runs an Adapter's torch module; the MaxText engine (maxtext_engine.py) runs a JAX model. Both count steps alike:
checkpoint k holds the state after k optimizer updates, and step k + 1 uses the rows that follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from te_plugin.config import Config
from te_plugin.training import checkpoint as ckpt
from te_plugin.training import distributed
from te_plugin.training.adapter import Adapter, compute_dtype
from te_plugin.training.distributed import World
from te_plugin.training.optimizer import MasterAdamW, fingerprint
from te_plugin.training.performance import peak_bf16_flops
from te_plugin.training.step import Schedule, Stepper, StepResult


class Engine(Protocol):
    """A built model with its optimizer and data, on this process's devices."""

    @property
    def devices(self) -> int:
        """Devices of the whole job, for rates per device."""

    def init_hash(self) -> str:
        """16 hexadecimal digits over the weights as they are: equal for every way of sharding, precision and framework."""

    def describe(self) -> dict[str, Any]:
        """What env.json should say of this engine's hardware and software, beyond torch's."""

    def start(self) -> None:
        """Called once, after weights were initialised or restored and before the first step."""

    def step(self, step: int, stop_requested: bool) -> StepResult:
        """Optimizer step `step` (1 is the first). No weight changes when the loss or the gradient norm is not finite."""

    def evaluate(self) -> float:
        """Mean loss over the held-out rows, in BF16 for FP8 runs."""

    def save(self, step: int, info: dict[str, Any]) -> None:
        """Write checkpoint `step`; CheckpointError when it cannot be written."""

    def latest(self) -> ckpt.Checkpoint | None:
        """The newest complete checkpoint of this run directory."""

    def restore(self, checkpoint: ckpt.Checkpoint) -> None:
        """Continue from a training checkpoint."""

    def init_from(self, checkpoint: ckpt.Checkpoint) -> None:
        """Start a new run from weights only."""

    def hardware_row(self, flops_rate: float) -> dict[str, float]:
        """Numbers for a row that depend on the device: peak memory, MFU from the rate in FLOP/s per device."""


class TorchEngine:
    """The engine of an Adapter: a torch module and MasterAdamW."""

    def __init__(self, cfg: Config, run_dir: Path, adapter: Adapter, world: World, data):
        self.cfg, self.run_dir, self.adapter, self.world = cfg, run_dir, adapter, world
        self.model = self._build()
        self.optimizer = MasterAdamW(
            self.model,
            world,
            beta1=cfg.optim.beta1,
            beta2=cfg.optim.beta2,
            eps=cfg.optim.eps,
            weight_decay=cfg.optim.weight_decay,
            clip_grad=cfg.optim.clip_grad,
        )
        self.stepper = Stepper(cfg, adapter, world, self.model, self.optimizer, data, Schedule.of(cfg))

    def _build(self) -> nn.Module:
        model = self.adapter.build_model(self.cfg, self.world.device)
        if self.cfg.parallel.name == "fsdp2":
            distributed.shard_fsdp2(model, self.adapter.shard_units(model), self.world, compute_dtype(self.cfg))
        return model

    @property
    def devices(self) -> int:
        return self.world.size

    def init_hash(self) -> str:
        return fingerprint(self.optimizer, self.world)

    def describe(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        # FP8 layers learn that the loop ends their steps; otherwise they would guess it from weights that moved in memory,
        # and FSDP2 moves weights at every gather.
        self.adapter.end_step(self.model, self.world)

    def step(self, step: int, stop_requested: bool) -> StepResult:
        return self.stepper.run(step, stop_requested)

    def evaluate(self) -> float:
        return self.stepper.evaluate()

    def save(self, step: int, info: dict[str, Any]) -> None:
        """FP32 weights, moments, FP8 state, RNG."""
        tensors = {**self.optimizer.tensors(), **ckpt.model_state(self.model), **self._rng()}
        ckpt.save(self.run_dir, step, tensors, info, self.world, self.cfg.schedule.keep_checkpoints)

    def latest(self) -> ckpt.Checkpoint | None:
        return ckpt.latest(self.run_dir)

    def restore(self, checkpoint: ckpt.Checkpoint) -> None:
        """Continue from a training checkpoint of this or another way of sharding."""
        ckpt.load(checkpoint, self.optimizer.tensors(), self.world)
        self.optimizer.set_steps_done(checkpoint.step)
        self.optimizer.publish()
        self._load_state(checkpoint)
        self._restore_rng(checkpoint)

    def init_from(self, checkpoint: ckpt.Checkpoint) -> None:
        """Start a new run from another run's or an imported model's weights."""
        weights = {name: t for name, t in self.optimizer.tensors().items() if name.startswith("model/")}
        ckpt.load(checkpoint, weights, self.world)
        self.optimizer.publish()
        self._load_state(checkpoint)

    def hardware_row(self, flops_rate: float) -> dict[str, float]:
        if self.world.device.type != "cuda":
            return {}
        row = {"mem/peak_alloc_gib": torch.cuda.max_memory_allocated(self.world.device) / 2**30}
        peak = peak_bf16_flops(torch.cuda.get_device_name(self.world.device))
        if peak is not None:
            row["perf/mfu_bf16_peak"] = flops_rate / peak
        return row

    def _load_state(self, checkpoint: ckpt.Checkpoint) -> None:
        ckpt.load_model_state(self.model, checkpoint, self.world)

    def _rng(self) -> dict[str, torch.Tensor]:
        found = {f"rng/cpu{self.world.rank}": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            found[f"rng/cuda{self.world.rank}"] = torch.cuda.get_rng_state(self.world.device)
        return found

    def _restore_rng(self, checkpoint: ckpt.Checkpoint) -> None:
        """Each rank's generator, when the run has the ranks that wrote them. (No op of the loop draws random numbers today.)"""
        stored = ckpt.stored_shapes(checkpoint, "rng", self.world)
        mine = {
            name: torch.empty(stored[name.split("/")[1]][0], dtype=torch.uint8)
            for name in self._rng()
            if name.split("/")[1] in stored
        }
        ckpt.read_tensors(checkpoint, mine, self.world)
        for name, state in mine.items():
            if name.startswith("rng/cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self.world.device)
