"""Grouped experts in Megatron's distributed checkpoints: one stacked weight here, one tensor an expert there."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.utils import get_pg_rank, get_pg_size


def sharded_experts(experts, prefix: str, sharded_offsets: tuple) -> dict:
    """Sharded state of a GroupedExperts: each stacked weight becomes a factory that cuts it into one tensor an expert.

    Keys are "<prefix>experts.linear_fc1.weight" (and fc2) with the expert as a leading global axis, and gate and up of fc1 as
    separate parts of the output axis: what Megatron's SequentialMLP writes, so either can load the other's checkpoint.
    """
    result = {}
    for name, split_axis, parts in (("linear_fc1", 0, 2), ("linear_fc2", 1, 1)):
        linear = getattr(experts, name)
        key = f"{prefix}experts.{name}.weight"
        replica = (0, 0, get_pg_rank(experts.dp_group))
        layout = _Layout(
            axis=split_axis, parts=parts, offsets=sharded_offsets, tp_rank=get_pg_rank(experts.tp_group),
            tp_size=get_pg_size(experts.tp_group), first=get_pg_rank(experts.ep_group) * experts.num_local_experts,
            total=get_pg_size(experts.ep_group) * experts.num_local_experts)
        result[f"{prefix}{name}.weight"] = ShardedTensorFactory(key, linear.weight, layout.cut, layout.join, replica)
    return result


class _Layout:
    """Where the parts of a stacked weight [E, out, in] lie in the checkpoint's global tensor."""

    def __init__(self, axis: int, parts: int, offsets: tuple, tp_rank: int, tp_size: int, first: int, total: int):
        self.axis, self.parts, self.offsets = axis, parts, offsets
        self.tp_rank, self.tp_size, self.first, self.total = tp_rank, tp_size, first, total

    @torch.no_grad()
    def cut(self, key: str, weight: torch.Tensor, replica_id, flattened_range) -> list[ShardedTensor]:
        axes = len(self.offsets) + 1
        shards = []
        for index, matrix in enumerate(weight.unbind(0)):
            expert = (len(self.offsets), self.first + index, self.total)
            for part, piece in enumerate(matrix.chunk(self.parts, self.axis)):
                place = (axes + self.axis, part * self.tp_size + self.tp_rank, self.parts * self.tp_size)
                shards.append(ShardedTensor.from_rank_offsets(key, piece, *self.offsets, expert, place, replica_id=replica_id,
                                                              prepend_axis_num=axes))
        return shards

    @torch.no_grad()
    def join(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        matrices = [torch.cat(pieces[i:i + self.parts], self.axis) for i in range(0, len(pieces), self.parts)]
        return torch.stack(matrices)
