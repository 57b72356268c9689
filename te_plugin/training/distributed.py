"""Processes, devices and sharding: who this process is, and how the model is spread over the others.

torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR) say who we are; without them the run is one process. The engines
are torch's: `fully_shard` for fsdp2, one all-reduce of the FP32 gradients for ddp; tensor parallelism is the adapter's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from te_plugin.config import ConfigError


@dataclass(frozen=True)
class World:
    """This process among the others. dp: ranks with other rows of the batch; tp: ranks with other parts of each weight."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    dp_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None
    owns_process_group: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_dp(self, tensor: torch.Tensor) -> torch.Tensor:
        """In-place sum over data-parallel ranks."""
        if self.dp_size > 1:
            dist.all_reduce(tensor, group=self.dp_group)
        return tensor

    def sum_tp(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.tp_size > 1:
            dist.all_reduce(tensor, group=self.tp_group)
        return tensor

    def sum_all(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    def broadcast_object(self, value):
        """The value that rank 0 holds."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def pick_device(name: str, local_rank: int) -> torch.device:
    """run.device: cpu, cuda, or auto (CUDA where torch sees one)."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "run.device=cuda: torch sees no GPU on this machine; set run.device=cpu, or run where the GPU is"
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; start fewer processes a node"
        )
    return torch.device("cuda", local_rank)


def start(device: str) -> World:
    """Join the process group (gloo on the CPU, nccl on GPUs). One process without torchrun makes a group of itself."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = pick_device(device, local_rank)
    owns = not dist.is_initialized()
    if owns:
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        if size > 1:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    group = dist.group.WORLD if size > 1 else None
    return World(chosen, rank, size, local_rank, dp_rank=rank, dp_size=size, dp_group=group, owns_process_group=owns)


def with_tensor_parallel(world: World, tp_group: dist.ProcessGroup, dp_group: dist.ProcessGroup) -> World:
    """The world once the adapter has split it into tensor- and data-parallel groups."""
    return replace(
        world,
        tp_group=tp_group,
        tp_rank=dist.get_rank(tp_group),
        tp_size=dist.get_world_size(tp_group),
        dp_group=dp_group,
        dp_rank=dist.get_rank(dp_group),
        dp_size=dist.get_world_size(dp_group),
    )


def stop(world: World) -> None:
    if world.owns_process_group and dist.is_initialized():
        dist.destroy_process_group()


def check_rows(global_rows: int, micro_rows: int, dp_size: int) -> int:
    """Microbatches a step on one rank."""
    if global_rows % (micro_rows * dp_size):
        raise ConfigError(
            f"schedule.global_rows={global_rows} is not a multiple of micro_rows={micro_rows} * {dp_size} data-parallel ranks: "
            f"every rank must get whole microbatches; change one of them"
        )
    return global_rows // (micro_rows * dp_size)


def shard_fsdp2(model: nn.Module, units: Iterable[nn.Module], world: World, compute_dtype: torch.dtype | None) -> None:
    """FSDP2 in place: FP32 sharded master weights, `compute_dtype` weights in forward and backward, FP32 gradient sums.

    units: the modules that are gathered and freed as one (transformer layers); the rest forms the root unit.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    model.float()
    mesh = DeviceMesh.from_group(world.dp_group or dist.group.WORLD, world.device.type)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # The loss is already divided by the global token count: gradients are summed, not averaged.
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name, parameter in model.named_parameters():
        for key, value in attributes[name].items():
            setattr(parameter, key, value)
