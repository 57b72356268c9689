"""The static facts of one RMSNorm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class NormProblem:
    """y[rows, columns] = x * rsqrt(mean(x^2) + eps) * weight[columns], statistics in FP32.

    A residual changes nothing that a kernel's choice depends on: h = x + residual, rounded to `dtype`, is normed in place of x
    (stage residual_forward), and the gradient that reaches h by other ways is added to that of the norm before it is rounded
    (residual_backward).
    """

    op: ClassVar[str] = "norm"

    rows: int
    columns: int
    dtype: str = "bf16"
    eps: float = 1e-5
    needs_backward: bool = True

    def __post_init__(self):
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps={self.eps} must be finite and at least 0; 1e-5 is what llama takes")
