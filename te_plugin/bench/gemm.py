"""Dense GEMM on Hopper: our kernels beside cuBLASLt (through torch) at the shapes of llama3.1-8B, 8192 tokens.

All take the same operands, quantised once and not timed. "fast" sums all of K in the tensor cores' 14 bits, which the plan takes
under forward_accumulation=fast only. The error is against float64 products of the values the codes stand for.
"""

from __future__ import annotations

import torch

from te_plugin.bench import Options, cuda
from te_plugin.bench.harness import Report, Row, call_cost_us, interleaved, relative_error

SHAPES = {"qkv": (8192, 6144, 4096), "proj": (8192, 4096, 4096), "fc1": (8192, 28672, 4096), "fc2": (8192, 4096, 14336)}
# op -> (scale_kind of the library, granularity of a, granularity of b)
KINDS = {
    "gemm fp8 tensor": (0, "tensor", "tensor"),
    "gemm fp8 row": (1, "row", "row"),
    "gemm fp8 1x128 x 128x128": (2, "block_1x128", "block_128x128"),
    "gemm fp8 1x128 x 1x128": (3, "block_1x128", "block_1x128"),
}


def run(options: Options) -> Report:
    """Measure the shapes that the options name; --dtype has no meaning here beyond bf16."""
    options.select(SHAPES, ("bf16",))
    report = Report("gemm", cuda.device())
    for name, shape in SHAPES.items():
        if not options.cases or name in options.cases:
            report.rows += measure(name, *shape, options.seconds)
    return report


def measure(name: str, m: int, n: int, k: int, seconds: float) -> list[Row]:
    generator = torch.Generator("cuda").manual_seed(1)
    a, b = (torch.randn(rows, k, generator=generator, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    rows = cuda.sampled_rows(m)
    out = []

    def record(op, calls, want):
        for call in calls.values():
            call()
        timings = interleaved(calls, seconds, device="cuda")
        for kernel, call in calls.items():
            result = call()
            error = relative_error((c if result is None else result)[rows], want)
            took = timings[kernel]
            out.append(
                Row(
                    op,
                    f"{name} {m}x{n}x{k}",
                    kernel,
                    kernel == "sm90",
                    took.median * 1e3,
                    took.low * 1e3,
                    took.high * 1e3,
                    2 * m * n * k / took.median / 1e12,
                    "TFLOP/s",
                    error,
                    turns=took.turns,
                    cpu_us=_call_cost() if kernel == "sm90" and op == "gemm fp8 tensor" else None,
                )
            )

    for op, (code, grain_a, grain_b) in KINDS.items():
        (qa, sa), (qb, sb) = cuda.quantize(a, grain_a), cuda.quantize(b, grain_b)
        want = (
            (cuda.dequantize(qa, sa, grain_a)[rows].double() @ cuda.dequantize(qb, sb, grain_b).double().t()).cpu().numpy()
        )
        calls = {
            "sm90": lambda qa=qa, qb=qb, sa=sa, sb=sb, code=code: cuda.function("gemm_fp8")(qa, qb, sa, sb, c, 0, 0, code, 0)
        }
        record(op, calls | _cublaslt(op, qa, qb, sa, sb), want)
    want = (a[rows].double() @ b.double().t()).cpu().numpy()
    record(
        "gemm bf16",
        {"sm90": lambda: cuda.function("gemm_bf16")(a, b, c, 0), "cuBLASLt": lambda: torch.mm(a, b.t())},
        want,
    )
    return out


def _cublaslt(op: str, qa, qb, sa, sb) -> dict:
    """cuBLASLt with the same codes; it wants block scales with rows (of A) or K blocks (of B) innermost."""

    def call(scale_a, scale_b, fast=False):
        return lambda: torch._scaled_mm(
            qa, qb.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    if op == "gemm fp8 tensor":
        return {"cuBLASLt fast": call(sa, sb, True), "cuBLASLt precise": call(sa, sb)}
    if op == "gemm fp8 row":
        return {"cuBLASLt fast": call(sa[:, None], sb[None], True), "cuBLASLt precise": call(sa[:, None], sb[None])}
    outer_a = sa.t().contiguous().t()
    return {"cuBLASLt": call(outer_a, sb.t()) if "128x128" in op else call(outer_a, sb.t().contiguous())}


def _call_cost() -> float:
    a = torch.zeros(128, 128, device="cuda").to(torch.float8_e4m3fn)
    one, c = torch.ones(1, device="cuda"), torch.empty(128, 128, device="cuda", dtype=torch.bfloat16)
    return call_cost_us(lambda: cuda.function("gemm_fp8")(a, a, one, one, c, 0, 0, 0, 0), "cuda")
