"""What the modules share: parameters on the right device, tensor-parallel attributes, and arguments nobody knows."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

from te_plugin.config import ConfigError


def refuse_unknown(owner: type, unknown: dict) -> None:
    """ConfigError when a newer Megatron passes an argument this module does not know, unless it only says "not asked for"."""
    asked = {name: value for name, value in unknown.items() if value is not None and value is not False}
    if asked:
        raise ConfigError(f"{owner.__name__} does not know the argument(s) {', '.join(f'{k}={v!r}' for k, v in asked.items())}; "
                          f"this megatron-core is newer than the plugin knows, or the option is not supported: unset it")


def new_parameter(shape: tuple[int, ...], config) -> torch.nn.Parameter:
    """An uninitialised parameter in config.params_dtype, on the device that the config builds on."""
    if config.use_cpu_initialization:
        device = None  # torch's default device: the CPU, or what an enclosing torch.device(...) context says
    elif getattr(config, "init_model_with_meta_device", False):
        device = torch.device("meta")
    else:
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


def initialise_shard(weight: torch.Tensor, full_shape: tuple[int, ...], dim: int, stride: int, rank: int, size: int,
                     init_method, is_expert: bool = False) -> None:
    """Fill one tensor-parallel shard from `init_method` drawn on the full weight, so that every TP size starts alike.

    Experts on a GPU draw from Megatron's expert generator instead: it differs between expert-parallel ranks, and must.
    """
    if weight.is_meta:
        return
    if is_expert and weight.is_cuda:
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()), torch.no_grad():
            init_method(weight)
        return
    full = torch.empty(full_shape, dtype=torch.float32, device=weight.device)
    init_method(full)
    with torch.no_grad():
        weight.copy_(take_shard(full, dim, stride, rank, size))


def take_shard(full: torch.Tensor, dim: int, stride: int, rank: int, size: int) -> torch.Tensor:
    """A rank's part of a weight. stride 2 (SwiGLU's [gate | up]): each rank gets its part of the gate and of the up matrix."""
    if size == 1:
        return full
    return torch.cat(full.chunk(size * stride, dim)[rank::size], dim)


def mark_tensor_parallel(weight: torch.nn.Parameter, dim: int, stride: int, expert_parallel: bool) -> None:
    """The attributes by which Megatron's optimizer, checkpoints and gradient reductions know a sharded parameter."""
    set_tensor_model_parallel_attributes(weight, True, dim, stride)
    weight.allreduce = not expert_parallel
