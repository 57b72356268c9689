"""QKV split + RoPE on Hopper, forward and backward in BF16 and with FP8 output, beside torch.compile of the same.

8192 tokens of llama3.1-8B (32 heads of q, 8 of k and v, 128 each). The rate counts ideal bytes: every input read once, every
output written once. Inputs take turns, so none is found in L2. The error is that of q (backward: of dqkv) on the first rows.
"""

from __future__ import annotations

import torch

from te_plugin import oracle
from te_plugin.bench import Options, cuda
from te_plugin.bench.harness import Report, Row, interleaved, relative_error
from te_plugin.numerics import E4M3

TOKENS, HEADS, KV_HEADS, DIM = 8192, 32, 8, 128
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
SHAPES = tuple((TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
KINDS = ("bf16", "delayed", "current")
SAMPLE = 64  # rows that are compared with float64
CASE = f"{TOKENS} tokens H{HEADS} G{KV_HEADS} D{DIM}"


def run(options: Options) -> Report:
    options.select(KINDS, ("bf16",))
    report = Report("rope", cuda.device())
    for kind in KINDS:
        if not options.cases or kind in options.cases:
            report.rows += _plain(options.seconds) if kind == "bf16" else _quantized(kind, options.seconds)
    return report


def _random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _table():
    positions = torch.arange(TOKENS, device="cuda", dtype=torch.int32)
    return positions, torch.from_numpy(oracle.rope_inv_freq(DIM)).cuda()


def _rotate(x, positions, inv_freq, sign):
    angle = positions.float()[:, None, None] * inv_freq
    cos, sin = angle.cos(), angle.sin() * sign
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _split(qkv, positions, inv_freq):
    q, k, v = qkv.view(TOKENS, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    return _rotate(q, positions, inv_freq, 1), _rotate(k, positions, inv_freq, 1), v.contiguous()


def _join(dq, dk, dv, positions, inv_freq):
    return torch.cat([_rotate(dq, positions, inv_freq, -1), _rotate(dk, positions, inv_freq, -1), dv], 1).flatten(1)


def _cast(qkv, positions, inv_freq, scale):
    """scale None: current scaling. Returns the codes of q, scale_inv, and the rest of what the kernel writes."""
    parts = _split(qkv, positions, inv_freq)
    amaxes = [x.abs().amax().float() for x in parts]
    scales = [E4M3.max / amax for amax in amaxes] if scale is None else scale.unbind()
    codes = [(x.float() * s).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn) for x, s in zip(parts, scales, strict=True)]
    return codes[0], [1 / s for s in scales], codes[1:], codes[2].permute(1, 2, 0).contiguous(), amaxes


def _plain(seconds: float) -> list[Row]:
    outputs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in SHAPES]
    dqkv = torch.empty(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    inputs = [(_random(TOKENS, WIDTH),) for _ in range(3)]
    grads = [tuple(_random(*shape) for shape in SHAPES) for _ in range(3)]
    table, split, join = _table(), torch.compile(_split), torch.compile(_join)

    def forward(qkv):
        cuda.function("qkv_rope")(qkv, *table, *outputs, 0)
        return outputs

    def backward(*grads):
        cuda.function("qkv_rope_backward")(*grads, *table, dqkv, 0)
        return dqkv

    nbytes = 2 * TOKENS * WIDTH * 2
    want = oracle.qkv_rope_backward(*map(_sampled, grads[0]), *_sampled_table(table))
    return [
        *_rows("QKV split + RoPE", forward, lambda qkv: split(qkv, *table), inputs, seconds, nbytes, _want_q(inputs, table),
               lambda made: made[0]),
        *_rows("QKV split + RoPE, backward", backward, lambda *grads: join(*grads, *table), grads, seconds, nbytes, want,
               lambda made: made),
    ]  # fmt: skip


def _quantized(kind: str, seconds: float) -> list[Row]:
    """E4M3 with one scale each for q, k and v, and v transposed."""
    codes = [torch.empty(shape, device="cuda", dtype=torch.uint8) for shape in (*SHAPES, (KV_HEADS, DIM, TOKENS))]
    scale_inv, stats = torch.empty(3, device="cuda"), torch.empty(3, 2, device="cuda")
    inputs = [(_random(TOKENS, WIDTH),) for _ in range(3)]
    table, compiled = _table(), torch.compile(_cast)
    scale = torch.full((3,), 80.0, device="cuda") if kind == "delayed" else None

    def ours(qkv):
        cuda.function("qkv_rope_quantize")(qkv, *table, scale, *codes, scale_inv, stats, 0, 0)
        return codes[0].view(torch.float8_e4m3fn), scale_inv

    return _rows(f"QKV split + RoPE + quantize, {kind}", ours, lambda qkv: compiled(qkv, *table, scale), inputs, seconds,
                 TOKENS * WIDTH * (2 + 1) + TOKENS * KV_HEADS * DIM, _want_q(inputs, table),
                 lambda made: made[0][:SAMPLE].float() * made[1][0])  # fmt: skip


def _sampled(x):
    return x[:SAMPLE].double().cpu().numpy()


def _sampled_table(table):
    return table[0][:SAMPLE].cpu().numpy(), table[1].cpu().numpy()


def _want_q(inputs, table):
    return oracle.qkv_rope(_sampled(inputs[0][0]), *_sampled_table(table), HEADS, KV_HEADS)[0]


def _rows(op, ours, peer, sets, seconds, nbytes, want, compared) -> list[Row]:
    """compared(what a call returned): the tensor whose first rows are held against `want`."""
    calls = {"sm90": cuda.Turns(ours, *sets), "torch.compile": cuda.Turns(peer, *sets)}
    timings = interleaved(calls, seconds, device="cuda")
    return [
        Row(op, CASE, kernel, kernel == "sm90", took.median * 1e3, took.low * 1e3, took.high * 1e3, nbytes / took.median / 1e12,
            "TB/s", relative_error(compared(calls[kernel].call(*sets[0]))[:SAMPLE], want), turns=took.turns)
        for kernel, took in timings.items()
    ]  # fmt: skip
