"""The static facts of one RMSNorm whose output is wanted in FP8 only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin.ops.norm.problem import NormProblem
from te_plugin.ops.quantize.problem import QuantizeProblem


@dataclass(frozen=True)
class NormQuantizeProblem:
    """RMSNorm of x, whose shape and dtype are those of `cast`, rounded to that dtype, then quantised as `cast` says.

    rstd[rows] is kept for backward. A residual is added first, as in NormProblem. Backward is that of RMSNorm (op "norm"): it
    needs x (with a residual: the sum) and rstd, not the normed tensor.
    """

    op: ClassVar[str] = "norm_quantize"

    cast: QuantizeProblem
    eps: float = 1e-5

    def __post_init__(self):
        self.parts()  # its ValueError names a wrong eps

    def parts(self) -> tuple[tuple[str, NormProblem | QuantizeProblem], ...]:
        """(name, problem) of the two ops that this one joins."""
        return ("norm", NormProblem(self.cast.rows, self.cast.columns, self.cast.dtype, self.eps)), ("quantize", self.cast)
