"""Opaque kernels on sharded arrays: an op that XLA's partitioner splits by a rule of ours in place of gathering its operands.

Inside jax.shard_map arrays are local already, so the op runs as it is there. With check_vma (the default) JAX keeps account of
the mesh axes over which an array varies, and derivative rules and compiled kernels must keep it too.
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


def varying_axes(*arrays) -> frozenset[str]:
    """The manual mesh axes over which any of these arrays varies (jax.shard_map with check_vma)."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary_over(axes: frozenset[str], x):
    """x, varying over these axes too."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def operands_of_call(*arrays) -> tuple:
    """The arrays of one call, each varying over every axis that one of them varies over. ValueError for explicit shardings.

    Then what a derivative rule gives has its arguments' type, and the gradient of an array that all devices share (a weight) is
    the sum over the devices, as it is through JAX's own products.
    """
    for x in arrays:
        spec = tuple(jax.typeof(x).sharding.spec)
        if any(axis_names(entry) for entry in spec):
            raise ValueError(
                f"an array of {x.dtype}{list(x.shape)} is sharded over explicit mesh axes, {jax.typeof(x).sharding.spec}, whose "
                f"types te_plugin's ops do not follow; make the mesh with axis_types=jax.sharding.AxisType.Auto, or call them "
                f"inside jax.shard_map"
            )
    axes = varying_axes(*arrays)
    return tuple(vary_over(axes, x) for x in arrays) if axes else arrays


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
