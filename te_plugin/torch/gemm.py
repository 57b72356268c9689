"""c[M,N] = a[M,K] b[N,K]^T for torch, with FP8 operands and their scales."""

from __future__ import annotations

import functools

import torch

from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import Plan, plan
from te_plugin.torch import launches
from te_plugin.torch.call import DTYPE_NAME, dtype_name, target_of
from te_plugin.torch.quantize import QuantizedTensor


@functools.lru_cache(maxsize=4096)
def _plan(m, n, k, dtype_a, dtype_b, scale_a, scale_b, out_dtype, accumulate, device, kernel, fallback) -> Plan:
    problem = GemmProblem(m, n, k, dtype_a, dtype_b, scale_a, scale_b, DTYPE_NAME[out_dtype], accumulate)
    return plan(problem, target_of(device), kernel, fallback)


class Operand:
    """One side of a scaled GEMM: data[R,K] in FP8 and its scale_inv."""

    __slots__ = ("data", "scale_inv", "granularity", "format")

    def __init__(self, data, scale_inv, granularity, format):
        self.data, self.scale_inv, self.granularity, self.format = data, scale_inv, granularity, format

    @classmethod
    def rowwise(cls, x: QuantizedTensor) -> Operand:
        return cls(x.data, x.scale_inv, x.granularity, x.dtype)

    @classmethod
    def transposed(cls, x: QuantizedTensor) -> Operand:
        return cls(x.data_t, x.scale_inv_t, x.granularity, x.dtype)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        from te_plugin.torch.quantize import dequantize

        return dequantize(self.data, self.scale_inv, self.granularity, self.format, dtype)


def scaled_gemm(a: Operand, b: Operand, out_dtype: torch.dtype, out: torch.Tensor | None = None, kernel: str = "auto",
                fallback: str = "error") -> torch.Tensor:
    """a b^T with FP32 accumulation. With `out` (FP32 [M,N]) the product is added to it in place and `out` is returned."""
    chosen = _plan(a.data.shape[0], b.data.shape[0], a.data.shape[1], a.format, b.format, a.granularity, b.granularity,
                   torch.float32 if out is not None else out_dtype, out is not None, a.data.device, kernel, fallback)
    if not torch.compiler.is_compiling():
        launches.record(chosen, "gemm")
    return SCALED[chosen.kernel.name](a, b, out_dtype, out)


def _composite_scaled(a: Operand, b: Operand, out_dtype, out):
    left, right = a.dequantize(torch.float32), b.dequantize(torch.float32)
    if out is not None:
        return out.addmm_(left, right.t())
    return torch.mm(left, right.t()).to(out_dtype)


SCALED = {"composite": _composite_scaled}


def plain_gemm(a: torch.Tensor, b: torch.Tensor, kernel: str = "auto", fallback: str = "error") -> torch.Tensor:
    """a[M,K] b[N,K]^T for unscaled operands of one dtype, in that dtype."""
    name = dtype_name(a)
    chosen = _plan(a.shape[0], b.shape[0], a.shape[1], name, name, None, None, a.dtype, False, a.device, kernel, fallback)
    if not torch.compiler.is_compiling():
        launches.record(chosen, "gemm")
    return PLAIN[chosen.kernel.name](a, b)


PLAIN = {"composite": lambda a, b: torch.mm(a, b.t())}
