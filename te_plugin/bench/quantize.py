"""Quantising BF16 to E4M3, with its transposed copy and without, against the machine's copy bandwidth.

With the transposed copy both move the same bytes: two read and two written for each value (the copy reads and writes a BF16
tensor, quantise reads BF16 and writes two FP8 copies); without it, quantise writes one byte. `of_copy` is the rate divided by
that of the copy in the same turns: the fraction of the machine's copy bandwidth that a scaling reaches. Scalings whose scale
depends on the whole tensor or row must read x twice, which the rate does not count. The second peer is what torch does in eager
mode. rel_error compares the dequantised codes with those of numerics.py on some rows; 0 means the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from te_plugin import numerics
from te_plugin.bench import Options
from te_plugin.bench.harness import Report, Row, call_cost_us, interleaved, relative_error
from te_plugin.ffi import function
from te_plugin.numerics import E4M3, GRANULARITIES, GRANULARITY_CODE
from te_plugin.ops.quantize.problem import scale_shape
from te_plugin.torch.quantize import quantize, scale_dtype

CHECKED_ROWS = 128
# Read and written for each value of x.
BYTES_PER_VALUE = {True: 4, False: 3}  # with the transposed copy, without
COPY = "copy, bf16 to bf16"


@dataclass(frozen=True)
class Case:
    """x[rows, columns] in BF16: larger than every cache, about a cache, and an activation of a small model."""

    name: str
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} bf16 to e4m3"


CASES = (Case("memory", 8192, 4096), Case("cache", 4096, 1024), Case("small", 2048, 256))


class Inputs:
    """Random values of a case, and outputs that every call writes again."""

    def __init__(self, case: Case):
        self.case = case
        self.x = torch.randn(case.rows, case.columns, generator=torch.Generator().manual_seed(1234)).to(torch.bfloat16)
        self.copied = torch.empty_like(self.x)
        self.data = torch.empty(case.rows, case.columns, dtype=torch.uint8)
        self.data_t = torch.empty(case.columns, case.rows, dtype=torch.uint8)
        self.stats = torch.empty(2)
        self.scales = {name: self._scales(name) for name in GRANULARITIES}
        self.kernel, self.plain_kernel = function("cpu", "quantize_transpose"), function("cpu", "quantize")

    def _scales(self, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
        kind = scale_dtype(granularity)
        shapes = (
            scale_shape(self.case.rows, self.case.columns, granularity),
            scale_shape(self.case.columns, self.case.rows, granularity),
        )
        return torch.empty(shapes[0], dtype=kind), torch.empty(shapes[1], dtype=kind)

    def ours(self, granularity: str) -> None:
        scale_inv, scale_inv_t = self.scales[granularity]
        self.kernel(
            self.x,
            self.data,
            scale_inv,
            self.data_t,
            scale_inv_t,
            self.stats,
            GRANULARITY_CODE[granularity],
            E4M3.code,
            0,
        )

    def plain(self, granularity: str) -> None:
        self.plain_kernel(self.x, self.data, self.scales[granularity][0], self.stats, GRANULARITY_CODE[granularity], E4M3.code, 0)

    def eager(self) -> torch.Tensor:
        wide = self.x.float()
        codes = (wide * (E4M3.max / wide.abs().amax())).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
        self.eager_t = codes.view(torch.uint8).t().contiguous()
        return codes

    def copy(self) -> None:
        self.copied.copy_(self.x)

    def error(self, granularity: str, transpose: bool) -> float:
        """Of the first rows, against numerics.py."""
        self.data.fill_(0xFF)
        (self.ours if transpose else self.plain)(granularity)
        rows = min(CHECKED_ROWS, self.case.rows)
        x, y = self.x[:rows].float().numpy(), torch.empty(self.case.rows, self.case.columns)
        function("cpu", "dequantize")(
            self.data, self.scales[granularity][0], y, GRANULARITY_CODE[granularity], E4M3.code
        )
        return relative_error(y[:rows], _dequantized(x, granularity, float(self.x.abs().max())))

    def eager_error(self) -> float:
        rows = min(CHECKED_ROWS, self.case.rows)
        amax = float(self.x.abs().max())
        got = self.eager()[:rows].float() * (amax / E4M3.max)
        return relative_error(got, _dequantized(self.x[:rows].float().numpy(), "tensor", amax))


def _dequantized(x: np.ndarray, granularity: str, amax: float) -> np.ndarray:
    """x[128, C] quantised and dequantised by numerics.py; amax: that of the whole tensor."""
    height, width = {"tensor": x.shape, "row": (1, x.shape[1]), "block_1x128": (1, 128), "block_128x128": (128, 128),
                     "mx": (1, 32)}[granularity]  # fmt: skip
    blocks = np.abs(x).reshape(x.shape[0] // height, height, x.shape[1] // width, width).max(axis=(1, 3))
    if granularity == "tensor":
        blocks[:] = amax
    scale, scale_inv = (np.repeat(np.repeat(s, height, 0), width, 1)
                        for s in numerics.scale_from_amax(blocks, E4M3, pow2=granularity == "mx"))  # fmt: skip
    return (E4M3.decode(E4M3.encode(x * scale)) * scale_inv).astype(np.float64)


def run(options: Options) -> Report:
    """Every scaling, eager torch and a copy, on every case, in turns."""
    options.select((case.name for case in CASES), ("bf16",))
    report = Report("quantize", torch.device("cpu"))
    for case in CASES:
        if not options.cases or case.name in options.cases:
            report.rows += measure(Inputs(case), options.seconds)
    return report


def measure(inputs: Inputs, seconds: float) -> list[Row]:
    calls = {(True, f"cpu, {name}"): (lambda name=name: inputs.ours(name)) for name in GRANULARITIES}
    calls |= {(True, COPY): inputs.copy, (True, "torch eager, tensor"): inputs.eager}
    calls |= {(False, f"cpu, {name}"): (lambda name=name: inputs.plain(name)) for name in GRANULARITIES}
    timings = interleaved(calls, seconds)
    errors = {(transpose, f"cpu, {name}"): inputs.error(name, transpose) for transpose in (True, False) for name in GRANULARITIES}
    errors |= {(True, COPY): 0.0, (True, "torch eager, tensor"): inputs.eager_error()}
    cost = call_cost_us(lambda x=torch.ones(1, 16, dtype=torch.bfloat16): quantize(x, "e4m3", "tensor", transpose=True))
    copy_rate = BYTES_PER_VALUE[True] / timings[True, COPY].median
    return [
        Row(
            op="quantise with transpose" if transpose else "quantise",
            case=str(inputs.case),
            kernel=name,
            ours=name.startswith("cpu"),
            ms=took.median * 1e3,
            ms_low=took.low * 1e3,
            ms_high=took.high * 1e3,
            rate=BYTES_PER_VALUE[transpose] * inputs.x.numel() / took.median / 1e9,
            unit="GB/s",
            rel_error=errors[transpose, name],
            cpu_us=cost if (transpose, name) == (True, "cpu, tensor") else None,
            turns=took.turns,
            of_copy=BYTES_PER_VALUE[transpose] / took.median / copy_rate,
        )
        for (transpose, name), took in timings.items()
    ]
