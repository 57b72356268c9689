"""What a call of attention or linear costs on the host beside its kernels, on inputs so small that the kernels hardly count.

`call us` is the time of the call minus the time of the same kernels called raw, with ready tensors, in turns: planning, checks
of the arguments, allocation of the results, dispatch, autograd. `start us` is the part of it before the first kernel begins.
`training`: with gradients on, the forward call alone.
An FP8 linear here has a LinearState that holds its quantised weight: the call quantises its input, and its GEMM on the CPU
dequantises both and multiplies in FP32, each a kernel of its own. rel_error compares the result with that of the raw kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from te_plugin import ffi, numerics
from te_plugin.bench import Options
from te_plugin.bench.harness import Report, Row, interleaved, relative_error
from te_plugin.ffi import function
from te_plugin.ops.quantize.problem import scale_shape
from te_plugin.torch.attention import attention
from te_plugin.torch.call import DTYPE_NAME
from te_plugin.torch.linear import linear
from te_plugin.torch.quantize import scale_dtype
from te_plugin.torch.state import LinearState

ROWS, FEATURES = 32, 128
MODES = ("no_grad", "training")
PRECISIONS = ("bf16", *numerics.SCALINGS)


def run(options: Options) -> Report:
    """Attention in FP32 and BF16, linear in every precision, without and with a graph."""
    options.select(("attention", "linear"), ("fp32", "bf16"))
    report = Report("calls", torch.device("cpu"))
    for mode in MODES:
        if not options.cases or "attention" in options.cases:
            for dtype in (torch.float32, torch.bfloat16):
                if options.dtype in (None, DTYPE_NAME[dtype]):
                    case = f"4x1x16 {DTYPE_NAME[dtype]}, {mode}"
                    report.rows.append(_row("attention call", case, *_attention(dtype, mode), options))
        if (not options.cases or "linear" in options.cases) and options.dtype in (None, "bf16"):
            for precision in PRECISIONS:
                case = f"{ROWS}x{FEATURES}x{FEATURES} {precision}, {mode}"
                report.rows.append(_row("linear call", case, *_linear(precision, mode), options))
    return report


def attention_cost_us(dtype: torch.dtype, mode: str, seconds: float = 0.3) -> float:
    """Microseconds of one attention call beside its kernel."""
    took = interleaved(dict(zip(("call", "raw"), _attention(dtype, mode), strict=True)), seconds, least=50)
    return (took["call"].median - took["raw"].median) * 1e6


def _row(op: str, case: str, call: Callable, raw: Callable, options: Options) -> Row:
    took = interleaved({"call": call, "raw": raw}, options.seconds / 4, least=50)
    error = relative_error(call(), raw().detach().double().numpy())
    start = _start_us(call)
    return Row(op, case, "cpu", ours=True, ms=took["call"].median * 1e3, ms_low=took["call"].low * 1e3,
               ms_high=took["call"].high * 1e3, rate=1 / took["call"].median, unit="calls/s", rel_error=error,
               cpu_us=(took["call"].median - took["raw"].median) * 1e6, turns=took["call"].turns, start_us=start)


class _Started(Exception):
    """Raised in place of a call's first kernel."""


def _start_us(call: Callable, turns: int = 5000) -> float:
    """Microseconds from a call to the beginning of its first kernel, compiled or torch's product: the median of many calls that
    end there."""
    began = 0.0

    def kernel(*_):
        nonlocal began
        began = time.perf_counter()
        raise _Started

    taken = []
    with mock.patch.object(ffi, "function", lambda library, name: kernel), mock.patch.object(torch, "mm", kernel):
        for _ in range(turns):
            start = time.perf_counter()
            try:
                call()
            except _Started:
                taken.append(began - start)
    return statistics.median(taken) * 1e6


def _in_mode(mode: str, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    if mode == "training":
        return call

    def without_graph():
        with torch.no_grad():
            return call()

    return without_graph


def _attention(dtype: torch.dtype, mode: str) -> tuple[Callable, Callable]:
    q, k, v = (torch.randn(4, 1, 16).to(dtype).requires_grad_(mode == "training") for _ in range(3))
    cu, out, lse = torch.tensor([0, 4], dtype=torch.int32), torch.empty(4, 1, 16, dtype=dtype), torch.empty(1, 4)
    kernel, plain = function("cpu", "attention_forward"), [x.detach() for x in (q, k, v)]

    def raw():
        kernel(*plain, cu, cu, cu, cu, out, lse, 1, -1, -1, 0.25)
        return out

    return _in_mode(mode, lambda: attention(q, k, v, cu_seqlens_q=cu)), raw


def _linear(precision: str, mode: str) -> tuple[Callable, Callable]:
    training, kind = mode == "training", numerics.scaling(precision)
    x, weight = (torch.randn(n, FEATURES).bfloat16().requires_grad_(training) for n in (ROWS, FEATURES))
    state = LinearState(precision) if kind else None
    call = _in_mode(mode, lambda: linear(x, weight, None, precision, state=state))
    if kind is None:
        plain = x.detach(), weight.detach().t()
        return call, lambda: torch.mm(*plain)
    call()  # the weight is quantised once a step, not by every call
    return call, _raw_fp8(x.detach(), weight.detach(), kind, state, training)


def _raw_fp8(x, weight, kind: numerics.Scaling, state: LinearState, training: bool) -> Callable:
    """The launches of one FP8 linear whose weight is quantised already."""
    granularity, code = kind.activation, numerics.GRANULARITY_CODE[kind.activation]
    format_code, wide = kind.forward_format.code, scale_dtype(granularity)
    data, data_t = torch.empty(ROWS, FEATURES, dtype=torch.uint8), torch.empty(FEATURES, ROWS, dtype=torch.uint8)
    scale_inv = torch.empty(scale_shape(ROWS, FEATURES, granularity), dtype=wide)
    scale_inv_t = torch.empty(scale_shape(FEATURES, ROWS, granularity), dtype=wide)
    stats, left, right = torch.empty(2), torch.empty(ROWS, FEATURES), torch.empty(FEATURES, FEATURES)
    name = ("quantize_with_scale" if kind.delayed else "quantize") + ("_transpose" if training else "")
    quantize, dequantize = function("cpu", name), function("cpu", "dequantize")
    cached = state.quantized_weight(weight, False, False) if state._cached is None else state._cached
    if kind.delayed:
        places = (data, data_t, scale_inv) if training else (data, scale_inv)
        arguments = (x, state.delayed.scale[:1], *places, stats, format_code)
    else:
        places = (data, scale_inv, data_t, scale_inv_t) if training else (data, scale_inv)
        arguments = (x, *places, stats, code, format_code, 0)
    weight_code = numerics.GRANULARITY_CODE[kind.weight]

    def raw():
        quantize(*arguments)
        dequantize(data, scale_inv, left, code, format_code)
        dequantize(cached.data, cached.scale_inv, right, weight_code, format_code)
        return torch.mm(left, right.t()).to(torch.bfloat16)

    return raw
