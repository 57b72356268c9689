"""Opaque kernels on sharded arrays: an op that XLA's partitioner splits by a rule of ours in place of gathering its operands.

Inside jax.shard_map arrays are local already, so the op runs as it is there.
"""

from __future__ import annotations

import math

import jax
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


def axis_names(axes) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if axes is None else (axes if isinstance(axes, tuple) else (axes,))


def split_axes(axes, mesh) -> int:
    """Into how many parts an entry of a PartitionSpec cuts a dimension."""
    return math.prod(mesh.shape[name] for name in axis_names(axes))


def inside_shard_map() -> bool:
    return bool(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def partitioned(function, specs, lower, rule: str, sizes: dict[str, int] | None = None, every: bool = False):
    """`function(*arrays) -> tuple` as an op with a sharding rule.

    specs(shape, spec, mesh) -> (specs of the operands, specs of the results), from the first operand's shape and the
    sharding it arrives with, padded to its rank; with every=True from the lists of all operands' shapes and shardings.
    lower(axes) -> the function of one device's parts, where axes[i][d] names the mesh axes that split dimension d of
    operand i. rule: a sharding rule in the notation of custom_partitioning, for Shardy; sizes: of its inner factors. Under
    vmap it runs once an element.
    """

    def arrives(operand):
        spec = tuple(getattr(operand.sharding, "spec", ()))
        return spec + (None,) * (len(operand.shape) - len(spec))

    def shardings(mesh, given):
        if every:
            operands, results = specs([g.shape for g in given], [arrives(g) for g in given], mesh)
        else:
            operands, results = specs(given[0].shape, arrives(given[0]), mesh)
        return (
            operands,
            [NamedSharding(mesh, PartitionSpec(*s)) for s in operands],
            [NamedSharding(mesh, PartitionSpec(*s)) for s in results],
        )

    def partition(mesh, operands, results):
        mesh = operands[0].sharding.mesh
        chosen, inputs, outputs = shardings(mesh, operands)
        axes = tuple(tuple(axis_names(entry) for entry in spec) for spec in chosen)
        return mesh, lower(axes), tuple(outputs), tuple(inputs)

    def infer(mesh, operands, results):
        return tuple(shardings(operands[0].sharding.mesh, operands)[2])

    op = custom_partitioning(lambda *operands: function(*operands))
    op.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule, **(sizes or {}))
    batched = sequential_vmap(lambda *operands: op(*operands))

    def call(*operands):
        return function(*operands) if inside_shard_map() else batched(*operands)

    return call
