"""Grouped GEMM on Hopper (mixture of experts): ours beside torch's grouped products, group sizes on the device.

16384 tokens, 4096 -> 14336, eight experts, even and uneven splits. The rows of single products time no quantisation; the rows
"forward + dgrad + wgrad" are the layer as a model calls it: x and dy are quantised in it, weights are cached, dW is added to an
FP32 main_grad.
"""

from __future__ import annotations

import torch

import te_plugin.torch as tp
from te_plugin.bench import Options, cuda
from te_plugin.bench.harness import Report, Row, interleaved, relative_error

TOKENS, OUT, IN = 16384, 14336, 4096
LAYER_PRECISIONS = ("bf16", "fp8_current", "fp8_rowwise", "fp8_block")
SPLITS = {"even": (2048,) * 8, "uneven": (4000, 100, 0, 6000, 2284, 1000, 3000, 0)}


def run(options: Options) -> Report:
    options.select(SPLITS, ("bf16",))
    report = Report("grouped", cuda.device())
    for name, sizes in SPLITS.items():
        if not options.cases or name in options.cases:
            report.rows += forward(name, sizes, options.seconds) + wgrad(name, sizes, options.seconds)
            report.rows += layer(name, sizes, options.seconds)
    return report


def _rows(op, name, calls, seconds, error, ours=("sm90",), products=1) -> list[Row]:
    timings = interleaved(calls, seconds, device="cuda")
    rows = []
    for kernel, call in calls.items():
        took = timings[kernel]
        rows.append(
            Row(
                op,
                f"{name} {TOKENS} tokens {IN}->{OUT} E8",
                kernel,
                kernel in ours,
                took.median * 1e3,
                took.low * 1e3,
                took.high * 1e3,
                products * 2 * TOKENS * OUT * IN / took.median / 1e12,
                "TFLOP/s",
                error(call),
                turns=took.turns,
            )
        )
    return rows


def _routing(sizes: tuple[int, ...]):
    """Group sizes and their ends on the device, sampled rows, and the expert of each of these."""
    device_sizes = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    ends = torch.cumsum(device_sizes, 0, dtype=torch.int32)
    samples = cuda.sampled_rows(TOKENS)
    return device_sizes, ends, samples, torch.searchsorted(ends, samples.int(), right=True)


def forward(name: str, sizes: tuple[int, ...], seconds: float) -> list[Row]:
    groups = len(sizes)
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(TOKENS, IN, generator=generator, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups * OUT, IN, generator=generator, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(TOKENS, OUT, device="cuda", dtype=torch.bfloat16)
    device_sizes, ends, samples, expert = _routing(sizes)

    def reference(x_values, w_values):
        weights = w_values.view(groups, OUT, IN)
        return (
            torch.stack([weights[e].double() @ x_values[r].double() for r, e in zip(samples, expert, strict=True)])
            .cpu()
            .numpy()
        )

    def error_of(want):
        def error(call):
            result = call()
            return relative_error((y if result is None else result)[samples], want)

        return error

    rows = _rows(
        "grouped bf16 forward",
        name,
        {
            "sm90": lambda: cuda.function("grouped_gemm")(x, w.view(groups, OUT, IN), device_sizes, y),
            "torch grouped": lambda: torch._grouped_mm(x, w.view(groups, OUT, IN).transpose(1, 2), offs=ends),
        },
        seconds,
        error_of(reference(x, w)),
    )
    for op, code, grain_x, grain_w in (
        ("grouped fp8 row forward", 1, "row", "row"),
        ("grouped fp8 block forward", 2, "block_1x128", "block_128x128"),
    ):
        (qx, sx), (qw, sw) = cuda.quantize(x, grain_x), cuda.quantize(w, grain_w)
        want = reference(cuda.dequantize(qx, sx, grain_x), cuda.dequantize(qw, sw, grain_w))
        weights, weight_scales = qw.view(groups, OUT, IN), sw.view(groups, -1, *sw.shape[1:])
        calls = {
            "sm90": lambda qx=qx, sx=sx, weights=weights, weight_scales=weight_scales, code=code: cuda.function(
                "grouped_gemm_fp8"
            )(qx, weights, sx, weight_scales, device_sizes, y, 0, 0, code)
        }
        if grain_x == "row":
            calls["torch grouped"] = lambda qx=qx, sx=sx, weights=weights, weight_scales=weight_scales: (
                torch._scaled_grouped_mm(
                    qx,
                    weights.transpose(1, 2),
                    sx,
                    weight_scales,
                    offs=ends,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )
            )
        rows += _rows(op, name, calls, seconds, error_of(want))
    return rows


def wgrad(name: str, sizes: tuple[int, ...], seconds: float) -> list[Row]:
    """dW accumulated into FP32; the error is that of one accumulation into zeros, on sampled rows of the first expert."""
    generator = torch.Generator("cuda").manual_seed(3)
    dy_t = torch.randn(OUT, TOKENS, generator=generator, device="cuda", dtype=torch.bfloat16)
    x_t = torch.randn(IN, TOKENS, generator=generator, device="cuda", dtype=torch.bfloat16)
    dw = torch.zeros(len(sizes), OUT, IN, device="cuda")
    device_sizes = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    samples = cuda.sampled_rows(OUT)
    rows = []
    for op, code, grain in (("grouped fp8 row wgrad", 1, "row"), ("grouped fp8 1x128 wgrad", 3, "block_1x128")):
        (qd, sd), (qx, sx) = cuda.quantize(dy_t, grain), cuda.quantize(x_t, grain)
        first = slice(0, sizes[0])
        want = (
            (cuda.dequantize(qd, sd, grain)[samples, first].double() @ cuda.dequantize(qx, sx, grain)[:, first].double().t())
            .cpu()
            .numpy()
        )

        def call(qd=qd, sd=sd, qx=qx, sx=sx, code=code):
            cuda.function("grouped_gemm_fp8_wgrad")(qd, qx, sd, sx, device_sizes, dw, 0, 0, code, 1)

        def error(call, want=want):
            dw.zero_()
            call()
            return relative_error(dw[0, samples], want)

        rows += _rows(op, name, {"sm90": call}, seconds, error)
    return rows


def layer(name: str, sizes: tuple[int, ...], seconds: float) -> list[Row]:
    """Forward, dgrad and wgrad of grouped linears; the error is that of dx on sampled rows."""
    groups = len(sizes)
    generator = torch.Generator("cuda").manual_seed(4)
    x = torch.randn(TOKENS, IN, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(TOKENS, OUT, generator=generator, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups, OUT, IN, generator=generator, device="cuda", dtype=torch.bfloat16)
    device_sizes, ends, samples, expert = _routing(sizes)
    want = torch.stack([w[e].double().T @ dy[r].double() for r, e in zip(samples, expert, strict=True)]).cpu().numpy()

    def ours(precision):
        weight = torch.nn.Parameter(w)  # one copy of the values for every candidate
        weight.main_grad = main_grad
        state = tp.LinearState(precision) if precision != "bf16" else None
        return backward_of(
            lambda: tp.grouped_linear(x, weight, device_sizes, precision, state=state, accumulate_main_grad=True)
        )

    def backward_of(product):
        def call():
            x.grad = None
            product().backward(dy)
            return x.grad

        return call

    main_grad = torch.zeros(w.shape, device="cuda")
    plain = w.clone().requires_grad_()

    def torch_grouped():
        plain.grad = None
        return torch._grouped_mm(x, plain.transpose(1, 2), offs=ends)

    calls = {f"te_plugin {precision}": ours(precision) for precision in LAYER_PRECISIONS}
    names = tuple(calls)
    calls["torch grouped bf16"] = backward_of(torch_grouped)

    def error(call):
        return relative_error(call()[samples], want)

    return _rows("grouped forward + dgrad + wgrad", name, calls, seconds, error, names, products=3)
