"""The static facts of one RMSNorm whose output is wanted in FP8 only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin.ops.norm.problem import NormProblem
from te_plugin.ops.quantize.problem import QuantizeProblem


@dataclass(frozen=True)
class NormQuantizeProblem:
    """RMSNorm of x[rows, columns], rounded to `dtype`, then quantised as QuantizeProblem says; rstd[rows] is kept for backward.

    A residual is added first, as in NormProblem. Backward is that of RMSNorm (op "norm"): it needs x (with a residual: the sum)
    and rstd, not the normed tensor.
    """

    op: ClassVar[str] = "norm_quantize"

    rows: int
    columns: int
    dtype: str = "bf16"
    eps: float = 1e-5
    format: str = "e4m3"
    granularity: str = "tensor"
    pow2_scale: bool = False
    transpose: bool = False
    delayed: bool = False

    def __post_init__(self):
        self.parts()  # their ValueErrors name a wrong eps, format or granularity

    def parts(self) -> tuple[tuple[str, NormProblem | QuantizeProblem], ...]:
        """(name, problem) of the two ops that this one joins."""
        return (("norm", NormProblem(self.rows, self.columns, self.dtype, self.eps)),
                ("quantize", QuantizeProblem(self.rows, self.columns, self.dtype, self.format, self.granularity,
                                             self.pow2_scale, self.transpose, self.delayed)))
