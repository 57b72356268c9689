"""Attention over packed segments against torch's scaled_dot_product_attention.

Peers: SDPA over the whole pack with a dense block-diagonal mask (made beforehand, not timed), and a loop of SDPA over the
segments. All take the same packed tensors. The rate counts the visible query-key pairs only, 4 H D operations a pair forward and
10 more backward, so a kernel that computes masked pairs too is charged for them. `call us` is the cost of a forward call beside
its kernel (bench/calls.py): without gradients in the forward rows, with them in the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from te_plugin.bench import Options
from te_plugin.bench.calls import attention_cost_us
from te_plugin.bench.harness import Report, Row, interleaved, relative_error
from te_plugin.oracle.attention import attention_backward, attention_forward
from te_plugin.torch.attention import attention
from te_plugin.torch.call import DTYPE_NAME


@dataclass(frozen=True)
class Case:
    """Causal self-attention over `lengths` with H query heads, G kv heads, head dim D."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        lengths = (f"{len(self.lengths)}x{self.lengths[0]}" if len(set(self.lengths)) == 1
                   else "+".join(str(length) for length in self.lengths))
        return f"{lengths} H{self.heads} G{self.kv_heads} D{self.dim} {DTYPE_NAME[self.dtype]} causal"

    @property
    def pairs(self) -> int:
        return sum(n * (n + 1) // 2 for n in self.lengths)


CASES = tuple(Case(name, lengths, h, g, d, dtype)
              for name, lengths, h, g, d in (
                  ("8x256", (256,) * 8, 8, 2, 128),
                  ("8x256-mha", (256,) * 8, 8, 8, 128),
                  ("documents", (611, 95, 318, 702, 322), 2, 1, 128),
                  ("one-long", (2048,), 8, 2, 64),
              ) for dtype in (torch.float32, torch.bfloat16))


class Inputs:
    """Random tensors of a case, and the float64 results."""

    def __init__(self, case: Case):
        generator = torch.Generator().manual_seed(1234)
        rows = sum(case.lengths)
        self.case = case

        def make(heads):
            return torch.randn(rows, heads, case.dim, generator=generator).to(case.dtype)

        self.q, self.k, self.v, self.dout = make(case.heads), make(case.kv_heads), make(case.kv_heads), make(case.heads)
        self.cu = torch.tensor([0, *np.cumsum(case.lengths)], dtype=torch.int32)
        segment = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
        row = torch.arange(rows)
        self.mask = (segment[:, None] == segment[None, :]) & (row[:, None] >= row[None, :])
        exact = [x.double().numpy() for x in (self.q, self.k, self.v)]
        self.want_out = attention_forward(*exact, self.cu.numpy())[0]
        self.want_grads = attention_backward(self.dout.double().numpy(), *exact, self.cu.numpy())
        self.leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]

    def ours(self, q, k, v):
        return attention(q, k, v, cu_seqlens_q=self.cu, mask="causal")

    def sdpa_dense(self, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=self._gqa)[0].transpose(0, 1)

    def sdpa_loop(self, q, k, v):
        parts = []
        for q_part, k_part, v_part in zip(*(x.split(self.case.lengths) for x in (q, k, v)), strict=True):
            heads_first = (x.transpose(0, 1)[None] for x in (q_part, k_part, v_part))
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=self._gqa)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    @property
    def _gqa(self) -> bool:
        return self.case.heads != self.case.kv_heads

    def forward(self, kernel):
        with torch.no_grad():
            return kernel(self.q, self.k, self.v)

    def train(self, kernel):
        """out and the gradients, as a training step computes them."""
        out = kernel(*self.leaves)
        return out, torch.autograd.grad(out, self.leaves, self.dout)


def run(options: Options) -> Report:
    """Measure the cases that the options name."""
    options.select((case.name for case in CASES), (DTYPE_NAME[case.dtype] for case in CASES))
    report = Report("attention", torch.device("cpu"))
    for case in CASES:
        if (not options.cases or case.name in options.cases) and options.dtype in (None, DTYPE_NAME[case.dtype]):
            report.rows += measure(Inputs(case), options.seconds)
    return report


def measure(inputs: Inputs, seconds: float) -> list[Row]:
    """Rows of one case: forward, and forward with backward, for every kernel."""
    case = inputs.case
    kernels = {"cpu": inputs.ours, "torch SDPA, dense mask": inputs.sdpa_dense, "torch SDPA, loop": inputs.sdpa_loop}
    forward = {name: (lambda kernel=kernel: inputs.forward(kernel)) for name, kernel in kernels.items()}
    train = {name: (lambda kernel=kernel: inputs.train(kernel)) for name, kernel in kernels.items()}
    rows = []
    for op, calls, flops in (("attention forward", forward, 4), ("attention forward+backward", train, 14)):
        timings = interleaved(calls, seconds)
        for name, kernel in kernels.items():
            if op == "attention forward":
                error = relative_error(inputs.forward(kernel), inputs.want_out)
            else:
                gradients = inputs.train(kernel)[1]
                error = max(relative_error(got, want) for got, want in zip(gradients, inputs.want_grads, strict=True))
            took = timings[name]
            rate = flops * case.heads * case.dim * case.pairs / took.median / 1e12
            mode = "no_grad" if op == "attention forward" else "training"
            cost = attention_cost_us(case.dtype, mode) if name == "cpu" else None
            rows.append(Row(op, str(case), name, ours=name == "cpu", ms=took.median * 1e3, ms_low=took.low * 1e3,
                            ms_high=took.high * 1e3, rate=rate, unit="TFLOP/s", rel_error=error, cpu_us=cost, turns=took.turns))
    return rows
