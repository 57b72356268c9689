"""The loop's adapter for Megatron-Core's GPTModel."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from te_plugin.config import Config
from te_plugin.training.adapter import Adapter
from te_plugin.training.distributed import World, with_tensor_parallel


def megatron_adapter() -> Adapter:
    from te_plugin.data import build_data
    from te_plugin.megatron import build_gpt, gpt_token_losses
    from te_plugin.torch import launches
    from te_plugin.torch.batch import to_device

    return Adapter(
        name="megatron",
        build_model=build_gpt,
        token_losses=gpt_token_losses,
        to_device=to_device,
        build_data=build_data,
        initialize=_initialize,
        finalize=_finalize,
        shard_units=_shard_units,
        evaluation=bf16_evaluation,
        begin_step=_begin_step,
        end_step=_end_step,
        nonfinite=_nonfinite,
        launches=launches.snapshot,
        reset_launches=launches.reset,
    )


def _initialize(cfg: Config, world: World) -> World:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from te_plugin.megatron import initialize

    initialize(cfg, world.device)
    destroy_moe_metrics_tracker()  # it keeps the number of layers of the first model with experts in the process
    if cfg.parallel.tensor_parallel == 1:
        return world
    return with_tensor_parallel(
        world, parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
    )


def _finalize() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _shard_units(model: nn.Module) -> list[nn.Module]:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


@contextlib.contextmanager
def bf16_evaluation(model: nn.Module):
    """Linear layers and attention of an FP8 model compute in BF16 inside, on the same weights; FP8 state is not touched."""
    from te_plugin.megatron import AttentionOptions, LinearPrecision

    changed = []
    for module in model.modules():
        precision, options = getattr(module, "precision", None), getattr(module, "options", None)
        if isinstance(precision, LinearPrecision) and precision.is_fp8:
            changed.append((module, "precision", precision))
            module.precision = replace(precision, precision="bf16")
        if isinstance(options, AttentionOptions) and options.precision == "fp8":
            changed.append((module, "options", options))
            module.options = replace(options, precision="bf16")
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _begin_step(model: nn.Module) -> None:
    """First microbatch: FP8 weights are quantised anew, all together where they can be (see refresh_weights)."""
    from te_plugin.torch import refresh_weights

    for module in model.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True
    refresh_weights(model)


def _end_step(model: nn.Module, world: World) -> None:
    from te_plugin.torch.state import advance_scaling

    advance_scaling(model, dist.group.WORLD if world.size > 1 else None)


def _nonfinite(model: nn.Module) -> torch.Tensor | None:
    """Non-finite values that FP8 quantisation met in the last microbatch (stats are (amax, count))."""
    from te_plugin.torch.state import states

    counts = [stats[1] for _, state in states(model) for stats in state.last_stats.values()]
    return torch.stack(counts).double().sum() if counts else None
