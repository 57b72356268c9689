"""The static facts of one matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

ACCUMULATIONS = ("fp32", "fast")


@dataclass(frozen=True)
class GemmProblem:
    """c[m, n] = a[m, k] b[n, k]^T, both operands K-major ("TN").

    dtype_a, dtype_b: fp32, bf16, fp16 or an FP8 format. scale_a, scale_b: the granularity of the operand's scale_inv, None for
    an unscaled operand. accumulate: c += (c is then the FP32 main_grad).
    accumulation: how the products are summed over k. fp32, or fast: FP8 tensor cores keep their own sum over all of k, about 14
    bits of it, where fp32 adds short sums up in FP32 (docs/numerics.md).
    """

    op: ClassVar[str] = "gemm"

    m: int
    n: int
    k: int
    dtype_a: str = "bf16"
    dtype_b: str = "bf16"
    scale_a: str | None = None
    scale_b: str | None = None
    out_dtype: str = "bf16"
    accumulate: bool = False
    accumulation: str = "fp32"

    def __post_init__(self):
        if self.accumulation not in ACCUMULATIONS:
            raise ValueError(f"accumulation={self.accumulation!r} is not one of {', '.join(ACCUMULATIONS)}")
