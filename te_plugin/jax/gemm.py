"""Matrix products for JAX: the plan names the kernel, XLA or a compiled one computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from te_plugin.jax import launches
from te_plugin.jax.call import dtype_name, target_of_backend
from te_plugin.jax.quantize import QuantizedArray, dequantize
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import PlanError, plan


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
    """[M,N] = a b^T with FP32 accumulation, in out_dtype."""
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
    launches.record(chosen, "gemm")
    if chosen.kernel.name not in KERNELS:
        raise PlanError(f"gemm: kernel {chosen.kernel.name!r} has no JAX form")
    return KERNELS[chosen.kernel.name](a, b).astype(out_dtype)


def _dot(a: Operand, b: Operand, left, right):
    numbers = (((a.contract,), (b.contract,)), ((), ()))
    return jax.lax.dot_general(left, right, numbers, preferred_element_type=jnp.float32)


def _composite(a: Operand, b: Operand):
    return _dot(a, b, a.values(), b.values())


def _xla(a: Operand, b: Operand):
    """XLA's own product: plain operands, or FP8 operands with one scale each (cuBLASLt on NVIDIA GPUs)."""
    product = _dot(a, b, a.data, b.data)
    return product if a.scale_inv is None else product * (a.scale_inv * b.scale_inv).reshape(1, 1)


# Kernels that exist in JAX only through XLA, by the name under which ops/gemm/kernels.py registers them.
KERNELS = {"composite": _composite, "xla": _xla}
