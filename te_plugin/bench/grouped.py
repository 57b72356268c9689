"""Grouped GEMM on Hopper (mixture of experts): ours beside torch's grouped products, group sizes on the device.

16384 tokens, 4096 -> 14336, eight experts, even and uneven splits. Operands are quantised once and not timed.
"""

from __future__ import annotations

import torch

from te_plugin.bench import Options, cuda
from te_plugin.bench.harness import Report, Row, interleaved, relative_error

TOKENS, OUT, IN = 16384, 14336, 4096
SPLITS = {"even": (2048,) * 8, "uneven": (4000, 100, 0, 6000, 2284, 1000, 3000, 0)}


def run(options: Options) -> Report:
    options.select(SPLITS, ("bf16",))
    report = Report("grouped", cuda.device())
    for name, sizes in SPLITS.items():
        if not options.cases or name in options.cases:
            report.rows += forward(name, sizes, options.seconds) + wgrad(name, sizes, options.seconds)
    return report


def _rows(op, name, calls, seconds, error) -> list[Row]:
    timings = interleaved(calls, seconds, device="cuda")
    rows = []
    for kernel, call in calls.items():
        took = timings[kernel]
        rows.append(
            Row(
                op,
                f"{name} {TOKENS} tokens {IN}->{OUT} E8",
                kernel,
                kernel == "sm90",
                took.median * 1e3,
                took.low * 1e3,
                took.high * 1e3,
                2 * TOKENS * OUT * IN / took.median / 1e12,
                "TFLOP/s",
                error(call),
                turns=took.turns,
            )
        )
    return rows


def forward(name: str, sizes: tuple[int, ...], seconds: float) -> list[Row]:
    groups = len(sizes)
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(TOKENS, IN, generator=generator, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups * OUT, IN, generator=generator, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(TOKENS, OUT, device="cuda", dtype=torch.bfloat16)
    device_sizes = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    ends = torch.cumsum(device_sizes, 0, dtype=torch.int32)
    samples = cuda.sampled_rows(TOKENS)
    expert = torch.searchsorted(ends, samples.int(), right=True)

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
