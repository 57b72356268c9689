"""Matrix products for JAX: the plan names the kernel, XLA or a compiled one computes it.

A compiled kernel is opaque to XLA, which would gather sharded operands around it. So it is a partitioned op (sharding.py): the
rows of both operands stay split, and where the summed dimension is split, each device sums its part and the parts are added.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from te_plugin import numerics
from te_plugin.jax import launches
from te_plugin.jax.call import dtype_name, launch, shape_of, target_of_backend
from te_plugin.jax.quantize import QuantizedArray, dequantize
from te_plugin.jax.sharding import axis_names, partitioned, split_axes
from te_plugin.ops.gemm.kernels import ROW_BYTES
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import Plan, PlanError, plan


@dataclass(frozen=True)
class Operand:
    """One side of a product: data[.,.] whose dimension `contract` is summed over. scale_inv None: plain values.

    Scales run along the dimension that is summed over, as `granularity` says for rows of [R,K].
    """

    data: Any
    contract: int = 1
    scale_inv: Any = None
    granularity: str | None = None
    format: str | None = None

    @property
    def extent(self) -> int:
        return self.data.shape[1 - self.contract]

    def values(self):
        """In FP32, dequantised where there are scales."""
        if self.scale_inv is None:
            return self.data
        return dequantize(self.data, self.scale_inv, self.granularity)


def along_rows(x: QuantizedArray) -> Operand:
    """x[R,K] summed over K."""
    return Operand(x.data, 1, x.scale_inv, x.granularity, x.dtype)


def along_columns(x: QuantizedArray) -> Operand:
    """x[K,C] summed over K: the transposed copy, or the array itself where its scales do not care about direction."""
    if x.data_t is not None:
        return Operand(x.data_t, 1, x.scale_inv_t, x.granularity, x.dtype)
    return Operand(x.data, 0, x.scale_inv, x.granularity, x.dtype)


def needs_transpose(granularity: str) -> bool:
    """Whether summing over rows needs scales of its own."""
    return granularity not in ("tensor", "block_128x128")


def matmul(a: Operand, b: Operand, out_dtype, kernel: str = "auto", fallback: str = "error"):
    """[M,N] = a b^T with FP32 accumulation (FP64 for plain FP64 operands), in out_dtype."""
    plain = a.scale_inv is None
    problem = GemmProblem(
        a.extent,
        b.extent,
        a.data.shape[a.contract],
        dtype_name(a.data) if plain else a.format,
        dtype_name(b.data) if plain else b.format,
        a.granularity,
        b.granularity,
        dtype_name(jax.ShapeDtypeStruct((), out_dtype)),
    )
    chosen = plan(problem, target_of_backend(), kernel, fallback)
    if chosen.kernel.library is not None:
        return _compiled(_k_major(a), _k_major(b), problem.out_dtype, chosen.kernel.name)
    launches.record(chosen, "gemm")
    if chosen.kernel.name not in KERNELS:
        raise PlanError(f"gemm: kernel {chosen.kernel.name!r} has no JAX form")
    return KERNELS[chosen.kernel.name](a, b).astype(out_dtype)


def _dot(a: Operand, b: Operand, left, right):
    numbers = (((a.contract,), (b.contract,)), ((), ()))
    wide = jnp.float64 if left.dtype == jnp.float64 else jnp.float32
    # XLA's default multiplies FP32 operands in TF32 on a GPU.
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jax.lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=wide)


def _composite(a: Operand, b: Operand):
    return _dot(a, b, a.values(), b.values())


def _xla(a: Operand, b: Operand):
    """XLA's own product: plain operands, or FP8 operands with one scale each (cuBLASLt on NVIDIA GPUs)."""
    product = _dot(a, b, a.data, b.data)
    return product if a.scale_inv is None else product * (a.scale_inv * b.scale_inv).reshape(1, 1)


def _k_major(x: Operand) -> Operand:
    """The operand as [R,K], as compiled kernels read it. Only scales without a direction lie the other way (needs_transpose)."""
    if x.contract == 1:
        return x
    scale_inv = x.scale_inv if x.granularity == "tensor" else x.scale_inv.T
    return Operand(x.data.T, 1, scale_inv, x.granularity, x.format)


def _run(chosen: Plan, a, scale_a, b, scale_b):
    """The compiled kernel on what one device holds."""
    problem = chosen.problem
    c = shape_of((problem.m, problem.n), problem.out_dtype)
    return launch(chosen, "gemm", [c], [a, b, scale_a, scale_b], chosen.attributes)[0]


@dataclass(frozen=True)
class _Product:
    """The static arguments of one compiled product."""

    format_a: str
    granularity_a: str
    format_b: str
    granularity_b: str
    out_dtype: str
    kernel: str

    def here(self, out_dtype: str, a, scale_a, b, scale_b):
        problem = GemmProblem(
            a.shape[0],
            b.shape[0],
            a.shape[1],
            self.format_a,
            self.format_b,
            self.granularity_a,
            self.granularity_b,
            out_dtype,
        )
        return _run(plan(problem, target_of_backend(), self.kernel), a, scale_a, b, scale_b)


def _compiled(a: Operand, b: Operand, out_dtype: str, kernel: str):
    product = _Product(a.format, a.granularity, b.format, b.granularity, out_dtype, kernel)
    # Shardy takes no factor of size 1, and a dimension with a block that is not whole cannot be cut.
    whole = [extent % numerics.BLOCK == 0 and extent > numerics.BLOCK for extent in (b.data.shape[0], a.data.shape[1])]
    (c,) = _op(product, *whole)(a.data, a.scale_inv, b.data, b.scale_inv)
    return c


def _scale_spec(granularity: str, rows, k) -> tuple:
    """What belongs to the dimensions of an operand's scale_inv, given what belongs to its rows and to K."""
    return {"tensor": (None,), "row": (rows,)}.get(granularity, (rows, k))


@functools.cache
def _op(p: _Product, whole_n: bool, whole_k: bool):
    """The partitioned op of one set of static arguments: a[m,k], scale_a, b[n,k], scale_b -> (c[m,n],).

    whole_n, whole_k: the dimension is a whole number of scale blocks, so a split of it can split its scales too.
    """
    blocks = p.granularity_a.startswith("block")
    blocks_n = p.granularity_b == "block_128x128"
    n_multiple = numerics.BLOCK if blocks_n else 1

    def specs(shapes, given, mesh):
        (m, k), (n, _) = shapes[0], shapes[2]
        (axes_m, axes_k), (axes_n, _) = given[0], given[2]
        if m % split_axes(axes_m, mesh):
            axes_m = None
        if k % (split_axes(axes_k, mesh) * (numerics.BLOCK if blocks else ROW_BYTES)):
            axes_k = None
        taken = {*axis_names(axes_m), *axis_names(axes_k)}
        if n % (split_axes(axes_n, mesh) * n_multiple) or taken & {*axis_names(axes_n)}:
            axes_n = None
        a, b = (axes_m, axes_k), (axes_n, axes_k)
        scales = _scale_spec(p.granularity_a, *a), _scale_spec(p.granularity_b, *b)
        return [a, scales[0], b, scales[1]], [(axes_m, axes_n)]

    def lower(axes):
        summed = axes[0][1]
        if not summed:
            return lambda *operands: (p.here(p.out_dtype, *operands),)
        dtype = jax.dtypes.canonicalize_dtype(shape_of((), p.out_dtype).dtype)
        return lambda *operands: (jax.lax.psum(p.here("fp32", *operands), summed).astype(dtype),)

    k = ("(k j)", "k") if blocks and whole_k else ("k", "p")
    n = ("(n i)", "n") if blocks_n and whole_n else ("n", "q" if blocks_n else "n")
    scale_a = {"tensor": "t", "row": "m"}.get(p.granularity_a, f"m {k[1]}")
    # Where K is not cut, the two scales have as many blocks but no name in common with the data.
    scale_b = {"tensor": "u", "row": "n"}.get(p.granularity_b, f"{n[1]} {k[1]}")
    rule = f"m {k[0]}, {scale_a}, {n[0]} {k[0]}, {scale_b} -> m {n[0]}"
    sizes = {name: numerics.BLOCK for name, used in (("j", k[0]), ("i", n[0])) if f" {name})" in used}
    return partitioned(lambda *operands: (p.here(p.out_dtype, *operands),), specs, lower, rule, sizes, every=True)


# Kernels that exist in JAX only through XLA, by the name under which ops/gemm/kernels.py registers them.
KERNELS = {"composite": _composite, "xla": _xla}
