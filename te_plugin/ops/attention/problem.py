"""The static facts of one attention call over packed segments (THD)."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import ClassVar

MASKS = ("none", "causal", "causal_top_left", "causal_bottom_right")
MASK_CODE = {name: code for code, name in enumerate(MASKS)}
DQ_ACCUMULATIONS = ("fp32", "bf16")
DQ_CODE = {name: code for code, name in enumerate(DQ_ACCUMULATIONS)}
ATTENTION_PRECISIONS = ("bf16", "fp8")


def checked_window(window, softmax_scale) -> tuple[int, int]:
    """(left, right) of a call's window, -1 for no limit; ValueError for it or a softmax_scale that is none."""
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale={softmax_scale} must be positive and finite; None means 1/sqrt(D)")
    if window is None:
        return -1, -1
    try:
        left, right = (-1 if side is None else operator.index(side) for side in window)
    except (TypeError, ValueError):
        raise ValueError(f"window={window!r} must be (left, right), whole numbers of keys; None or -1 means no limit. A causal "
                         f"window of W keys, the row's own included, is (W - 1, 0)") from None
    return left, right


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

    def visible(self, same, delta):
        """Which keys rows see, bool arrays of any framework. same: they share a segment; delta: position of the key minus that of
        the row, both in the segment."""
        left, right = self.window
        if self.mask != "none":
            same = same & (delta <= 0)
        if left >= 0:
            same = same & (delta >= -left)
        if right >= 0:
            same = same & (delta <= right)
        return same

    @property
    def scale(self) -> float:
        return self.softmax_scale if self.softmax_scale is not None else 1.0 / math.sqrt(self.head_dim)
