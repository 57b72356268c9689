"""Quantise on Hopper, rows and rows + transposed, alone, fused with RMSNorm and SwiGLU, and of whole models together.

8192 x 14336 BF16 (llama3.1-8B fc2 input) to E4M3, beside torch.compile. The rate counts ideal bytes: every input read once,
every output written once; `of_copy` is that rate divided by the one of a device copy of the same bytes in the same turns, because
devices differ by a tenth. Inputs take turns, so none is found in L2. The error is that of the dequantised row-major copy against
the input.
"""

from __future__ import annotations

import torch

from te_plugin.bench import Options, cuda
from te_plugin.bench.harness import Report, Row, interleaved, relative_error
from te_plugin.bench.quantize_many import together
from te_plugin.numerics import E4M3, GRANULARITY_CODE

ROWS, COLS, HIDDEN = 8192, 14336, 4096
KINDS = ("delayed", "tensor", "row", "block_1x128", "block_128x128", "mx")


def run(options: Options) -> Report:
    options.select(KINDS, ("bf16",))
    report = Report("quantize", cuda.device())
    for kind in KINDS:
        if not options.cases or kind in options.cases:
            report.rows += cast(kind, False, options.seconds) + cast(kind, True, options.seconds)
            report.rows += fused(kind, options.seconds) + together(kind, options.seconds)
    return report


def _random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _outputs(rows: int, cols: int, kind: str, transpose: bool):
    granularity = "tensor" if kind == "delayed" else kind
    out = [torch.empty(rows, cols, dtype=torch.uint8, device="cuda"), cuda.scales(granularity, rows, cols)]
    turned = (
        [torch.empty(cols, rows, dtype=torch.uint8, device="cuda"), cuda.scales(granularity, cols, rows)]
        if transpose
        else [None, None]
    )
    return granularity, out, turned, torch.empty(2, device="cuda")


def _row(op, case, kernel, took, copied, nbytes, error) -> Row:
    return Row(
        op,
        case,
        kernel,
        kernel == "sm90",
        took.median * 1e3,
        took.low * 1e3,
        took.high * 1e3,
        nbytes / took.median / 1e12,
        "TB/s",
        error,
        turns=took.turns,
        of_copy=copied.median / took.median,
    )


def cast(kind: str, transpose: bool, seconds: float) -> list[Row]:
    granularity, out, turned, stats = _outputs(ROWS, COLS, kind, transpose)
    scale = torch.tensor([80.0], device="cuda")
    sets = [(_random(ROWS, COLS),) for _ in range(3)]
    code = GRANULARITY_CODE[granularity]
    if kind == "delayed":
        name, extra = ("quantize_with_scale_transpose", [turned[0]]) if transpose else ("quantize_with_scale", [])
        ours = lambda x: cuda.function(name)(x, scale, out[0], *extra, out[1], stats, 0)  # noqa: E731
    elif transpose:
        ours = lambda x: cuda.function("quantize_transpose")(x, *out, *turned, stats, code, 0, 0)  # noqa: E731
    else:
        ours = lambda x: cuda.function("quantize")(x, *out, stats, code, 0, 0)  # noqa: E731
    calls = {"sm90": cuda.Turns(ours, *sets)}
    if peer := _compiled(kind, transpose):
        calls["torch.compile"] = cuda.Turns((lambda x: peer(x, scale)) if kind == "delayed" else peer, *sets)
    nbytes = ROWS * COLS * (4 if transpose else 3)
    timings = interleaved({**calls, "copy": cuda.copy_of(nbytes)}, seconds, device="cuda")
    x = sets[0][0]
    rows = []
    for kernel, call in calls.items():
        result = call.call(x)
        if kernel == "sm90":
            data, inverse = out
        else:
            data, inverse = result[0].view(torch.uint8), result[1].reshape(out[1].shape).contiguous()
        y = cuda.dequantize(data, inverse, granularity)
        error = relative_error(y[:64], x[:64].double().cpu().numpy())
        rows.append(
            _row(
                "quantize" + (" + transposed" if transpose else ""),
                f"{kind} {ROWS}x{COLS}",
                kernel,
                timings[kernel],
                timings["copy"],
                nbytes,
                error,
            )
        )
    return rows


def _compiled(kind: str, transpose: bool):
    """The same cast in torch, compiled; MX and 128x128 are left out (no short form that compiles into one pass)."""
    limit = E4M3.max

    def finish(x, scale, inverse):
        data = (x.float() * scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
        return (data, inverse, data.t().contiguous()) if transpose else (data, inverse)

    def delayed(x, scale):
        return finish(x, scale, 1 / scale)

    def tensor(x):
        amax = x.abs().amax().float()
        return finish(x, limit / amax, amax / limit)

    def row(x):
        amax = x.abs().amax(1, keepdim=True).float()
        return finish(x, limit / amax, amax / limit)

    def block_1x128(x):
        blocks = x.view(x.shape[0], -1, 128)
        amax = blocks.abs().amax(2, keepdim=True).float()
        data = (blocks.float() * (limit / amax)).to(torch.float8_e4m3fn).view(x.shape)
        return data, (amax / limit).squeeze(2)

    chosen = {
        "delayed": delayed,
        "tensor": tensor,
        "row": None if transpose else row,
        "block_1x128": None if transpose else block_1x128,
    }.get(kind)
    return torch.compile(chosen) if chosen else None


def fused(kind: str, seconds: float) -> list[Row]:
    """RMSNorm (8192 x 4096), SwiGLU and its gradient (8192 x 2*14336), each with quantise, both copies."""
    scale = torch.tensor([80.0], device="cuda") if kind == "delayed" else None
    rows = []
    granularity, out, turned, stats = _outputs(ROWS, HIDDEN, kind, True)
    code = GRANULARITY_CODE[granularity]
    w, rstd = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), torch.empty(ROWS, device="cuda")
    norm = cuda.Turns(
        lambda x: cuda.function("rms_norm_quantize")(x, None, w, None, rstd, scale, *out, *turned, stats, 1e-5, code, 0, 0),
        *[(_random(ROWS, HIDDEN),) for _ in range(6)],
    )
    x = norm.sets[0][0]
    x64 = x[:64].double()
    want = (x64 / (x64.square().mean(1, keepdim=True) + 1e-5).sqrt()).cpu().numpy()
    rows.append(
        _fused_row(
            "RMSNorm + quantize + transposed",
            f"{kind} {ROWS}x{HIDDEN}",
            norm,
            seconds,
            ROWS * HIDDEN * 4,
            out,
            granularity,
            want,
        )
    )
    granularity, out, turned, stats = _outputs(ROWS, COLS, kind, True)
    swiglu = cuda.Turns(
        lambda x: cuda.function("swiglu_quantize")(x, scale, *out, *turned, stats, code, 0, 0),
        *[(_random(ROWS, 2 * COLS),) for _ in range(2)],
    )
    gate, up = (t.double() for t in swiglu.sets[0][0][:64].split(COLS, 1))
    rows.append(
        _fused_row(
            "SwiGLU + quantize + transposed",
            f"{kind} {ROWS}x{2 * COLS}",
            swiglu,
            seconds,
            ROWS * COLS * 6,
            out,
            granularity,
            (gate * gate.sigmoid() * up).cpu().numpy(),
        )
    )
    granularity, out, turned, stats = _outputs(ROWS, 2 * COLS, kind, True)
    dy = _random(ROWS, COLS)
    gradient = cuda.Turns(
        lambda x: cuda.function("dswiglu_quantize")(dy, x, scale, *out, *turned, stats, code, 0, 0), *swiglu.sets
    )
    s = gate.sigmoid()
    want = torch.cat([dy[:64].double() * up * s * (1 + gate * (1 - s)), dy[:64].double() * gate * s], 1).cpu().numpy()
    rows.append(
        _fused_row(
            "dSwiGLU + quantize + transposed",
            f"{kind} {ROWS}x{2 * COLS}",
            gradient,
            seconds,
            ROWS * COLS * 10,
            out,
            granularity,
            want,
        )
    )
    return rows


def _fused_row(op, case, call, seconds, nbytes, out, granularity, want) -> Row:
    took = interleaved({"sm90": call, "copy": cuda.copy_of(nbytes)}, seconds, device="cuda")
    call.call(*call.sets[0])
    error = relative_error(cuda.dequantize(*out, granularity)[:64], want)
    return _row(op, case, "sm90", took["sm90"], took["copy"], nbytes, error)
