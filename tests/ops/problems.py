"""The table of attention problems that every kernel is run on, and the inputs made for them.

A case states lengths and layout; capacity (unused segments), gaps and tails are spelled by `slots`: the rows a segment
occupies in memory, of which the first `length` are real. The last slot is stretched by `tail` rows.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AttentionCase:
    """One packed batch. k_lengths None: keys as queries. window sides: None is no limit. spread: standard deviation of Q."""

    name: str
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...] | None = None
    q_slots: tuple[int, ...] | None = None
    k_slots: tuple[int, ...] | None = None
    q_tail: int = 0
    k_tail: int = 0
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    mask: str = "causal"
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    spread: float = 1.0

    @property
    def self_attention(self) -> bool:
        return self.k_lengths is None

    @property
    def gaps(self) -> bool:
        return self.q_slots is not None or self.k_slots is not None

    @property
    def segments(self) -> int:
        return len(self.q_lengths)

    @functools.cached_property
    def cu_q(self) -> np.ndarray:
        return _cumulative(self.q_lengths)

    @functools.cached_property
    def cu_k(self) -> np.ndarray:
        return self.cu_q if self.self_attention else _cumulative(self.k_lengths)

    @functools.cached_property
    def start_q(self) -> np.ndarray:
        return _cumulative(self.q_slots or self.q_lengths)

    @functools.cached_property
    def start_k(self) -> np.ndarray:
        return self.start_q if self.self_attention else _cumulative(self.k_slots or self.k_lengths)

    @property
    def q_rows(self) -> int:
        return int(self.start_q[-1]) + self.q_tail

    @property
    def k_rows(self) -> int:
        return self.q_rows if self.self_attention else int(self.start_k[-1]) + self.k_tail

    def q_range(self, n: int) -> slice:
        return slice(int(self.start_q[n]), int(self.start_q[n]) + self.q_lengths[n])

    def k_range(self, n: int) -> slice:
        lengths = self.q_lengths if self.self_attention else self.k_lengths
        return slice(int(self.start_k[n]), int(self.start_k[n]) + lengths[n])

    def outside(self, side: str) -> np.ndarray:
        """bool[rows]: rows of q ("q") or of k and v ("k") that belong to no segment."""
        rows, ranges = (self.q_rows, self.q_range) if side == "q" else (self.k_rows, self.k_range)
        outside = np.ones(rows, dtype=bool)
        for n in range(self.segments):
            outside[ranges(n)] = False
        return outside

    def alone(self, n: int) -> AttentionCase:
        """Segment n as a batch of its own."""
        keys = None if self.self_attention else (self.k_lengths[n],)
        return AttentionCase(f"{self.name}/segment{n}", (self.q_lengths[n],), keys, heads=self.heads,
                             kv_heads=self.kv_heads, head_dim=self.head_dim, mask=self.mask, window=self.window,
                             scale=self.scale, spread=self.spread)  # fmt: skip

    def inputs(self) -> dict[str, np.ndarray]:
        """float32 q, k, v, dout: normal numbers whose seed is the case's name."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        q = rng.standard_normal((self.q_rows, self.heads, self.head_dim), dtype=np.float32) * np.float32(self.spread)
        k, v = (rng.standard_normal((self.k_rows, self.kv_heads, self.head_dim), dtype=np.float32) for _ in range(2))
        dout = rng.standard_normal(q.shape, dtype=np.float32)
        return {"q": q, "k": k, "v": v, "dout": dout}


def _cumulative(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _case(name, q, k=None, **options) -> AttentionCase:
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return AttentionCase(name, tuple(q), None if k is None else tuple(k), **options)


TOP_LEFT, BOTTOM_RIGHT, NONE = ({"mask": m} for m in ("causal_top_left", "causal_bottom_right", "none"))

# The five tables on which a wrong dQ layout was found in the field (every segment after the first was corrupt).
SEGMENT_TABLES = [
    _case("table-256", [256], heads=4, kv_heads=2, head_dim=128),
    _case("table-100-80-76", [100, 80, 76], heads=4, kv_heads=2, head_dim=128),
    _case("table-128-128", [128, 128], heads=4, kv_heads=2, head_dim=128),
    _case("table-64x4", [64] * 4, heads=4, kv_heads=2, head_dim=128),
    _case("table-200-56", [200, 56], heads=4, kv_heads=2, head_dim=128),
]

LENGTHS = [
    _case("one-token", [1]),
    _case("all-length-1", [1] * 19),
    _case("no-rows", [0]),
    _case("tile-63-64-65", [63, 64, 65]),
    _case("tile-127-128-129", [127, 128, 129]),
    _case("tile-15-16-17-31-32-33", [15, 16, 17, 31, 32, 33]),
    _case("tile-129-then-1", [129, 1]),
    _case("one-then-257", [1, 257]),
    _case("zero-first", [0, 5, 9]),
    _case("zero-middle", [5, 0, 9]),
    _case("zero-last", [5, 9, 0]),
    _case("zero-runs", [0, 0, 7, 0, 0, 0, 70, 0]),
    _case("many-short", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5]),
    _case("long", [517], heads=1),
    _case("long-short-long", [190, 2, 170]),
]

PADDING = [
    _case("all-empty-with-rows", [0, 0, 0], q_tail=7),
    _case("tail-only", [40, 30], q_slots=[40, 88]),
    _case("tail-outside-slots", [40, 30], q_tail=58),
    _case("tail-one-row", [64, 64], q_tail=1),
    _case("gaps-documented", [1, 1, 1, 4, 3, 2, 1, 1], q_slots=[1, 1, 2, 4, 4, 2, 1, 1]),
    _case("gap-before-everything", [0, 33, 20], q_slots=[9, 48, 32], heads=3, kv_heads=3),
    _case("gaps-of-a-tile", [60, 100], q_slots=[128, 128], q_tail=64),
    _case("gaps-zero-segments", [0, 17, 0, 40], q_slots=[16, 32, 16, 48]),
    _case("capacity-repeated", [30, 20, 0, 0, 0, 0, 0, 0]),
    _case("capacity-with-tail", [30, 20, 0, 0, 0], q_slots=[32, 64, 0, 0, 0]),
]

CROSS = [
    _case("bottom-right-longer-keys", [5, 3, 17, 64], [9, 3, 40, 130], **BOTTOM_RIGHT),
    _case("bottom-right-longer-queries", [9, 70, 5], [2, 7, 5], **BOTTOM_RIGHT),
    _case("top-left-longer-keys", [5, 3, 17], [9, 3, 140], **TOP_LEFT),
    _case("top-left-longer-queries", [9, 140], [2, 70], **TOP_LEFT),
    _case("no-mask-cross", [33, 1, 65], [7, 129, 64], **NONE),
    _case("decode", [0, 1, 0, 1], [0, 3, 0, 5], heads=9, kv_heads=3, scale=1.0, **BOTTOM_RIGHT),
    _case("segments-without-queries", [0, 5, 3, 0], [4, 7, 3, 6], heads=4, head_dim=128, **BOTTOM_RIGHT),
    _case("segments-without-keys", [5, 4, 3], [0, 6, 0], **NONE),
    _case("single-query-long-keys-64", [1], [512], heads=8, kv_heads=8, **NONE),
    _case("single-query-long-keys-256", [1], [512], kv_heads=2, head_dim=256, **BOTTOM_RIGHT),
    _case("cross-gaps-and-tails", [5, 0, 30], [9, 4, 33], q_slots=(8, 8, 32), k_slots=(16, 4, 40), q_tail=3, k_tail=5, **NONE),
]

WINDOWS = [
    _case("window-2", [6, 3], window=(2, 0)),
    _case("window-self-only", [9, 70], window=(0, 0)),
    _case("window-tile", [200, 65], window=(64, 0)),
    _case("window-causal-no-right", [150], window=(31, None)),
    _case("window-two-sided", [100, 31], window=(3, 5), **NONE),
    _case("window-right-only", [70, 20], window=(None, 4), **NONE),
    _case("window-bottom-right", [20, 70], [90, 80], window=(16, None), **BOTTOM_RIGHT),
    _case("window-rows-without-keys", [40], [7], window=(2, 0), **NONE),
    _case("window-rows-without-keys-bottom-right", [50, 3], [20, 80], window=(4, 0), **BOTTOM_RIGHT),
    _case("window-longer-than-segments", [30, 40], window=(1000, 1000)),
]

HEADS = [
    _case("gqa-8-to-1", [40, 25], heads=8, kv_heads=1),
    _case("gqa-6-to-3", [40, 25], heads=6, kv_heads=3),
    _case("mha-5", [40, 25], heads=5, kv_heads=5),
    *(_case(f"head-dim-{d}", [70, 33], head_dim=d) for d in (8, 33, 80, 96, 100, 120, 160, 192, 256)),
]

VALUES = [
    _case("softmax-scale-1", [40, 25], scale=1.0),
    _case("softmax-scale-tiny", [40, 25], scale=1e-3),
    _case("sharp-softmax", [65, 40], spread=30.0),
]

CASES = [*SEGMENT_TABLES, *LENGTHS, *PADDING, *CROSS, *WINDOWS, *HEADS, *VALUES]

# XLA compiles anew for every shape, which costs a hundred times what the problem does: JAX, which calls the same compiled
# kernels, is run on the tables and on one case of each kind.
COMPILED_PER_SHAPE = [
    *SEGMENT_TABLES[1:3],
    *(c for c in CASES if c.name in {
        "no-rows", "zero-middle", "tail-outside-slots", "gaps-documented", "capacity-with-tail",
        "bottom-right-longer-queries", "segments-without-queries", "window-bottom-right", "gqa-6-to-3",
    }),
]  # fmt: skip
