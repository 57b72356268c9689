"""The static facts of one grouped matrix product (mixture of experts)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin import numerics

STAGES = ("forward", "dgrad", "wgrad")
# An expert's weight of at least this many values fills a GPU by itself; smaller ones are quantised together.
LARGE_EXPERT = 1 << 22


@dataclass(frozen=True)
class GroupedGemmProblem:
    """Rows are sorted by group, and group e has a weight of its own. m is the capacity in rows; group sizes are device data.

    forward and dgrad: y[m, n] = a[m, k] b[e][n, k]^T with e the group of the row (dgrad: a is dy, b is W^T, so n is the number of
    in features). wgrad: dw[e][n, k] = dy^T x over the rows of group e, in FP32 or dtype.
    dtype: of activations and results. precision: as in numerics.PRECISIONS; for FP8 both operands come quantised.
    """

    op: ClassVar[str] = "grouped_gemm"

    m: int
    n: int
    k: int
    groups: int
    dtype: str = "bf16"
    precision: str = "bf16"
    stage: str = "forward"

    def __post_init__(self):
        if self.groups < 1:
            raise ValueError(f"groups={self.groups}: at least one group is needed")
        if self.stage not in STAGES:
            raise ValueError(f"stage={self.stage!r} is not one of {', '.join(STAGES)}")

    def operands(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(format, granularity) of both FP8 operands: x and W, dy and W^T, or dy^T and x^T."""
        kind = numerics.scaling(self.precision)
        if kind is None:
            raise ValueError(f"precision {self.precision} has no FP8 operands")
        x = (kind.forward_format.name, kind.activation)
        dy = (kind.gradient_format.name, kind.gradient)
        w = (kind.forward_format.name, kind.weight)
        return {"forward": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[self.stage]
