"""c[M,N] = a[M,K] b[N,K]^T for torch, with FP8 operands and their scales, or plain ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from te_plugin import ffi
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import Plan, plan, remember
from te_plugin.torch import launches
from te_plugin.torch.call import DTYPE_NAME, define, dtype_name, empty, is_direct, target_of
from te_plugin.torch.options import Options
from te_plugin.torch.quantize import QuantizedTensor, dequantize


@dataclass(frozen=True)
class GemmOptions(Options):
    """The non-tensor arguments of a GEMM: format and granularity of each operand ("none": unscaled), choice of kernel.

    accumulation: see GemmProblem.
    """

    format_a: str = "none"
    granularity_a: str = "none"
    format_b: str = "none"
    granularity_b: str = "none"
    kernel: str = "auto"
    fallback: str = "error"
    accumulation: str = "fp32"


class Operand(NamedTuple):
    """One side of a scaled GEMM: data[R,K] in FP8 and its scale_inv."""

    data: torch.Tensor
    scale_inv: torch.Tensor
    granularity: str
    format: str

    @classmethod
    def rowwise(cls, x: QuantizedTensor) -> Operand:
        return cls(x.data, x.scale_inv, x.granularity, x.dtype)

    @classmethod
    def transposed(cls, x: QuantizedTensor) -> Operand:
        return cls(x.data_t, x.scale_inv_t, x.granularity, x.dtype)


@remember
def _plan(m, n, k, plain_dtype, out_dtype, accumulate, device, key) -> Plan:
    o = GemmOptions.from_key(key)
    if o.format_a == "none":
        problem = GemmProblem(m, n, k, plain_dtype, plain_dtype, None, None, DTYPE_NAME[out_dtype], accumulate)
    else:
        problem = GemmProblem(m, n, k, o.format_a, o.format_b, o.granularity_a, o.granularity_b, DTYPE_NAME[out_dtype],
                              accumulate, o.accumulation)
    return plan(problem, target_of(device), o.kernel, o.fallback)


def run_scaled(chosen: Plan, a, scale_a, b, scale_b, options: str, out_dtype: torch.dtype, out: torch.Tensor | None):
    """Run a planned product of FP8 operands; with `out` it is added there. Counts nothing (launches.record is the caller's)."""
    if chosen.kernel.library is None:
        return SCALED[chosen.kernel.name](GemmOptions.from_key(options), a, scale_a, b, scale_b, out_dtype, out)
    if out is None:
        out = empty((a.shape[0], b.shape[0]), out_dtype, a.device)
    ffi.function(chosen.kernel.library, chosen.kernel.entry_points["gemm"])(a, b, scale_a, scale_b, out, *chosen.attributes)
    return out


def _scaled(a, scale_a, b, scale_b, options: str, out_dtype: torch.dtype):
    chosen = _plan(a.shape[0], b.shape[0], a.shape[1], None, out_dtype, False, a.device, options)
    launches.record(chosen, "gemm")
    return run_scaled(chosen, a, scale_a, b, scale_b, options, out_dtype, None)


def _scaled_accumulate(a, scale_a, b, scale_b, out, options: str) -> None:
    chosen = _plan(a.shape[0], b.shape[0], a.shape[1], None, out.dtype, True, a.device, options)
    launches.record(chosen, "gemm")
    run_scaled(chosen, a, scale_a, b, scale_b, options, out.dtype, out)


def _plain(a, b, options: str):
    chosen = _plan(a.shape[0], b.shape[0], a.shape[1], dtype_name(a), a.dtype, False, a.device, options)
    launches.record(chosen, "gemm")
    return PLAIN[chosen.kernel.name](a, b)


_SCALED_OPERANDS = "Tensor a, Tensor scale_a, Tensor b, Tensor scale_b"
define(f"scaled_gemm({_SCALED_OPERANDS}, str options, ScalarType out_dtype) -> Tensor", _scaled,
       lambda a, scale_a, b, scale_b, options, out_dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype))
define(f"scaled_gemm_accumulate({_SCALED_OPERANDS}, Tensor(a!) out, str options) -> ()", _scaled_accumulate,
       lambda a, scale_a, b, scale_b, out, options: None)
define("plain_gemm(Tensor a, Tensor b, str options) -> Tensor", _plain,
       lambda a, b, options: a.new_empty((a.shape[0], b.shape[0])))


def _composite_scaled(o: GemmOptions, a, scale_a, b, scale_b, out_dtype, out):
    left = dequantize(a, scale_a, o.granularity_a, o.format_a)
    right = dequantize(b, scale_b, o.granularity_b, o.format_b)
    if out is not None:
        return out.addmm_(left, right.t())
    return torch.mm(left, right.t()).to(out_dtype)


def _cublaslt_scaled(o: GemmOptions, a, scale_a, b, scale_b, out_dtype, out):
    """b is handed over as [K,N], and so are its scales; scales of 1x128 blocks lie with the rows of their operand innermost."""
    blocks = o.granularity_a == "block_1x128"
    if o.granularity_a == "row":
        scale_a, scale_b = scale_a[:, None], scale_b[None]
    elif blocks:
        scale_a = scale_a.t().contiguous().t()
        scale_b = scale_b.t() if o.granularity_b == "block_128x128" else scale_b.t().contiguous()
    product = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=o.accumulation == "fast")
    return product if out is None else out.add_(product)


# Kernels that exist in torch only, by the name under which ops/gemm/kernels.py registers them.
SCALED = {"composite": _composite_scaled, "cublaslt": _cublaslt_scaled}
PLAIN = {"composite": lambda a, b: torch.mm(a, b.t()), "cublaslt": lambda a, b: torch.mm(a, b.t())}


@functools.lru_cache(maxsize=1024)
def _key(format_a, granularity_a, format_b, granularity_b, kernel, fallback, accumulation="fp32") -> str:
    return GemmOptions(format_a, granularity_a, format_b, granularity_b, kernel, fallback, accumulation).key()


def scaled_gemm(a: Operand, b: Operand, out_dtype: torch.dtype, out: torch.Tensor | None = None, kernel: str = "auto",
                fallback: str = "error", accumulation: str = "fp32") -> torch.Tensor:
    """a b^T. With `out` (FP32 [M,N]) the product is added to it in place and `out` is returned. accumulation: see GemmProblem."""
    if not is_direct(a.data):
        key = GemmOptions(a.format, a.granularity, b.format, b.granularity, kernel, fallback, accumulation).key()
        if out is None:
            return torch.ops.te_plugin.scaled_gemm(a.data, a.scale_inv, b.data, b.scale_inv, key, out_dtype)
        torch.ops.te_plugin.scaled_gemm_accumulate(a.data, a.scale_inv, b.data, b.scale_inv, out, key)
        return out
    key = _key(a.format, a.granularity, b.format, b.granularity, kernel, fallback, accumulation)
    if out is None:
        return _scaled(a.data, a.scale_inv, b.data, b.scale_inv, key, out_dtype)
    _scaled_accumulate(a.data, a.scale_inv, b.data, b.scale_inv, out, key)
    return out


def plain_gemm(a: torch.Tensor, b: torch.Tensor, kernel: str = "auto", fallback: str = "error") -> torch.Tensor:
    """a[M,K] b[N,K]^T for unscaled operands of one dtype, in that dtype."""
    if not is_direct(a):
        return torch.ops.te_plugin.plain_gemm(a, b, GemmOptions(kernel=kernel, fallback=fallback).key())
    return _plain(a, b, _key("none", "none", "none", "none", kernel, fallback))
