"""The static facts of one RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class NormProblem:
    """y[rows, columns] = x * rsqrt(mean(x^2) + eps) * weight[columns], statistics in FP32."""

    op: ClassVar[str] = "norm"

    rows: int
    columns: int
    dtype: str = "bf16"
    eps: float = 1e-5
    needs_backward: bool = True
