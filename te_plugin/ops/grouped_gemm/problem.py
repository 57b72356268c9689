"""The static facts of one grouped matrix product (mixture of experts)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

STAGES = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class GroupedGemmProblem:
    """Rows of x[m, k] are sorted by group; group e multiplies weight[e]: y = x weight[e]^T.

    m is the capacity in rows; group sizes are device data. precision: as in numerics.PRECISIONS. wgrad accumulates in FP32.
    """

    op: ClassVar[str] = "grouped_gemm"

    m: int
    n: int
    k: int
    groups: int
    dtype: str = "bf16"
    precision: str = "bf16"
    needs_backward: bool = True

    def __post_init__(self):
        if self.groups < 1:
            raise ValueError(f"groups={self.groups}: at least one group is needed")
