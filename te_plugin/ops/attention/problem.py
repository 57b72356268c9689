"""The static facts of one attention call over packed segments (THD)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

MASKS = ("none", "causal", "causal_top_left", "causal_bottom_right")
MASK_CODE = {name: code for code, name in enumerate(MASKS)}
DQ_ACCUMULATIONS = ("fp32", "bf16")
DQ_CODE = {name: code for code, name in enumerate(DQ_ACCUMULATIONS)}
ATTENTION_PRECISIONS = ("bf16", "fp8")


@dataclass(frozen=True)
class AttentionProblem:
    """q[tokens_q, heads, head_dim], k and v[tokens_kv, kv_heads, head_dim], `segments` segments (capacity, empty ones included).

    window: (left, right) keys that a row sees beside its own position, -1 = no limit.
    softmax_scale None means 1/sqrt(head_dim). gaps: segments may have unused rows between them.
    segment_capacity: the longest q segment that scratch laid out per segment must hold; None means all rows of q.
    precision "fp8" quantises Q, K, V, P, dO and dS; "bf16" computes in the dtype of the tensors with FP32 statistics.
    """

    op: ClassVar[str] = "attention"

    tokens_q: int
    tokens_kv: int
    segments: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    mask: str = "causal"
    window: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    precision: str = "bf16"
    needs_backward: bool = True
    deterministic: bool = False
    dq_accumulation: str = "fp32"
    gaps: bool = False
    segment_capacity: int | None = None

    def __post_init__(self):
        if self.mask not in MASKS:
            raise ValueError(f"mask {self.mask!r} is not one of {', '.join(MASKS)}")
        if self.dq_accumulation not in DQ_ACCUMULATIONS:
            raise ValueError(f"dq_accumulation {self.dq_accumulation!r} is not one of {', '.join(DQ_ACCUMULATIONS)}")
        if self.precision not in ATTENTION_PRECISIONS:
            raise ValueError(f"attention precision {self.precision!r} is not one of {', '.join(ATTENTION_PRECISIONS)}")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim < 1 or self.segments < 0 or self.tokens_q < 0 or self.tokens_kv < 0:
            raise ValueError(f"sizes must not be negative: {self}")
        if any(side < -1 for side in self.window):
            raise ValueError(f"window {self.window} has a side below -1; -1 means no limit")

    @property
    def scale(self) -> float:
        return self.softmax_scale if self.softmax_scale is not None else 1.0 / math.sqrt(self.head_dim)
