"""The seam between the loop and the framework that holds the model.

The loop knows a model only through an Adapter. `megatron_adapter()` is the real one; tests bring a small torch model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_plugin.config import Config
from te_plugin.training.distributed import World


def _no_units(model: nn.Module) -> list[nn.Module]:
    return []


def _nothing(*_: Any) -> None:
    return None


def _torch_engine(cfg: Config, run_dir: Path, adapter: Adapter, world: World, data: Any):
    from te_plugin.training.engine import TorchEngine

    return TorchEngine(cfg, run_dir, adapter, world, data)


@dataclass(frozen=True)
class Adapter:
    """What the loop asks of a framework.

    initialize(cfg, world) -> World: set up the framework's process groups; finalize() takes them down again.
    build_model(cfg, device) -> module with the same initial weights for every toggle.
    token_losses(model, batch) -> float32[T] per-token losses, 0 where the label is -100. batch: to_device's result.
    to_device(batch, device): a NumPy Batch or PaddedBatch on the device.
    build_data(cfg) -> te_plugin.data.Data.
    shard_units(model): modules that FSDP2 gathers and frees as one.
    evaluation(model): context in which forward passes run in BF16 and touch no FP8 state.
    begin_step(model): the weights are new since the last microbatch.
    end_step(model, world): FP8 scaling moves on
        (layers that did not run since the last call keep their state).
    nonfinite(model) -> tensor or None: non-finite values seen by FP8 quantisation in the last microbatch.
    launches() -> rows for kernels.json, counted since the last reset_launches().
    make_engine(cfg, run_dir, adapter, world, data) -> engine.Engine: what trains. The default runs the torch module of the other
        functions; an adapter of another framework brings its own engine and leaves those alone.
    """

    name: str
    build_data: Callable[[Config], Any]
    build_model: Callable[[Config, torch.device], nn.Module] = _nothing
    token_losses: Callable[[nn.Module, Any], torch.Tensor] = _nothing
    to_device: Callable[[Any, torch.device], Any] = _nothing
    initialize: Callable[[Config, World], World] = lambda cfg, world: world
    finalize: Callable[[], None] = _nothing
    shard_units: Callable[[nn.Module], Iterable[nn.Module]] = _no_units
    evaluation: Callable[[nn.Module], contextlib.AbstractContextManager] = lambda model: contextlib.nullcontext()
    begin_step: Callable[[nn.Module], None] = _nothing
    end_step: Callable[[nn.Module, World], None] = _nothing
    nonfinite: Callable[[nn.Module], torch.Tensor | None] = _nothing
    launches: Callable[[], list[dict[str, Any]]] = list
    reset_launches: Callable[[], None] = _nothing
    make_engine: Callable[[Config, Path, Adapter, World, Any], Any] = _torch_engine


def compute_dtype(cfg: Config) -> torch.dtype | None:
    """The dtype of weights in forward and backward: FP32 runs keep FP32, everything else computes from BF16 weights."""
    return None if cfg.precision.name == "fp32" else torch.bfloat16
