"""Packed (THD) attention in float64: the definition of masks, windows, gaps and empty segments.

Shapes: Tq/Tk rows, N segments, H query heads, G kv heads (H % G == 0; head h uses kv head h // (H/G)), D head dim.
Segment n holds query rows start_q[n] .. start_q[n] + (cu_q[n+1] - cu_q[n]) and the keys likewise. A row outside every
segment is never read; its output and gradient are 0 and its log-sum-exp is -inf. The same holds for a query row that
sees no key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MASKS = ("none", "causal", "causal_top_left", "causal_bottom_right")


@dataclass(frozen=True)
class Segment:
    """One segment: its query rows and its key rows, as half-open ranges of the packed tensors."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int

    @property
    def q_len(self) -> int:
        return self.q_end - self.q_begin

    @property
    def k_len(self) -> int:
        return self.k_end - self.k_begin


def segment_table(cu_q, cu_k=None, start_q=None, start_k=None, *, q_rows: int, k_rows: int, mask: str = "none") -> list[Segment]:
    """Segments of a packed batch, checked.

    cu_*: [N+1] cumulative real lengths, first entry 0. start_*: [N] or [N+1] first row of each segment (default: cu_*).
    Raises ValueError for decreasing lists, a segment outside the tensor, lists of different length, an unknown mask,
    and mask "causal" over a segment whose query and key lengths differ.
    """
    if mask not in MASKS:
        raise ValueError(f"mask {mask!r} is unknown; known masks: {', '.join(MASKS)}")
    cu_q = _cumulative(cu_q, "cu_seqlens_q")
    cu_k = cu_q if cu_k is None else _cumulative(cu_k, "cu_seqlens_kv")
    if len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_q has {len(cu_q)} entries and cu_seqlens_kv {len(cu_k)}; they must agree")
    start_q = cu_q if start_q is None else np.asarray(start_q)
    start_k = cu_k if start_k is None else np.asarray(start_k)
    segments = []
    for n in range(len(cu_q) - 1):
        q_len, k_len = int(cu_q[n + 1] - cu_q[n]), int(cu_k[n + 1] - cu_k[n])
        segment = Segment(int(start_q[n]), int(start_q[n]) + q_len, int(start_k[n]), int(start_k[n]) + k_len)
        for name, begin, end, rows in (
            ("query", segment.q_begin, segment.q_end, q_rows),
            ("key", segment.k_begin, segment.k_end, k_rows),
        ):
            if end > begin and (begin < 0 or end > rows):
                raise ValueError(f"segment {n} holds {name} rows {begin}..{end} but the tensor has {rows} rows")
        if mask == "causal" and q_len != k_len:
            raise ValueError(
                f"mask 'causal' needs equal lengths, but segment {n} has {q_len} queries and {k_len} keys; "
                "say causal_top_left or causal_bottom_right"
            )
        segments.append(segment)
    return segments


def visible_keys(q_len: int, k_len: int, mask: str, window: tuple[int | None, int | None] | None = None) -> np.ndarray:
    """bool[q_len, k_len]: which keys each query row of a segment sees.

    window (left, right): row i sees keys i-left .. i+right, None or -1 is no limit. causal_bottom_right counts i from
    the end of the keys: i + (k_len - q_len). Causal masks are a right limit of 0.
    """
    left, right = window if window is not None else (None, None)
    position = np.arange(q_len)[:, None] + (k_len - q_len if mask == "causal_bottom_right" else 0)
    key = np.arange(k_len)[None, :]
    seen = np.ones((q_len, k_len), dtype=bool)
    if left is not None and left >= 0:
        seen &= key >= position - left
    if right is not None and right >= 0:
        seen &= key <= position + right
    if mask != "none":
        seen &= key <= position
    return seen


def attention_forward(
    q, k, v, cu_q, cu_k=None, start_q=None, start_k=None, *, mask="causal", window=None, scale=None
) -> tuple[np.ndarray, np.ndarray]:
    """q[Tq,H,D], k[Tk,G,D], v[Tk,G,Dv] -> out[Tq,H,Dv] and log-sum-exp lse[H,Tq], both float64. scale: 1/sqrt(D)."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    heads, ratio = _heads(q, k)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out = np.zeros((q.shape[0], heads, v.shape[-1]))
    lse = np.full((heads, q.shape[0]), -np.inf)
    for segment in segment_table(cu_q, cu_k, start_q, start_k, q_rows=len(q), k_rows=len(k), mask=mask):
        seen = visible_keys(segment.q_len, segment.k_len, mask, window)
        rows, keys = slice(segment.q_begin, segment.q_end), slice(segment.k_begin, segment.k_end)
        for h in range(heads):
            p, lse[h, rows] = softmax(_float(q[rows, h]) @ _float(k[keys, h // ratio]).T * scale, seen)
            out[rows, h] = p @ _float(v[keys, h // ratio])
    return out, lse


def attention_backward(
    dout, q, k, v, cu_q, cu_k=None, start_q=None, start_k=None, *, mask="causal", window=None, scale=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dout[Tq,H,Dv] -> dq[Tq,H,D], dk[Tk,G,D], dv[Tk,G,Dv] in float64.

    Rows of no segment, and rows without keys, get 0.
    """
    dout, q, k, v = (np.asarray(x) for x in (dout, q, k, v))
    heads, ratio = _heads(q, k)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for segment in segment_table(cu_q, cu_k, start_q, start_k, q_rows=len(q), k_rows=len(k), mask=mask):
        seen = visible_keys(segment.q_len, segment.k_len, mask, window)
        rows, keys = slice(segment.q_begin, segment.q_end), slice(segment.k_begin, segment.k_end)
        for h in range(heads):
            g = h // ratio
            q_s, k_s, v_s, do_s = _float(q[rows, h]), _float(k[keys, g]), _float(v[keys, g]), _float(dout[rows, h])
            p, _ = softmax(q_s @ k_s.T * scale, seen)
            dp = do_s @ v_s.T
            ds = p * (dp - np.sum(p * dp, axis=1, keepdims=True))
            dq[rows, h] = ds @ k_s * scale
            dk[keys, g] += ds.T @ q_s * scale
            dv[keys, g] += p.T @ do_s
    return dq, dk, dv


def softmax(scores: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(p, lse) of scores[Sq,Sk] over the visible keys; a row that sees none has p = 0 and lse = -inf."""
    lse = np.full(len(scores), -np.inf)
    p = np.zeros(scores.shape)
    some = seen.any(axis=1)
    if some.any():
        masked = np.where(seen[some], scores[some], -np.inf)
        top = masked.max(axis=1, keepdims=True)
        e = np.exp(masked - top)
        total = e.sum(axis=1, keepdims=True)
        p[some] = e / total
        lse[some] = (top + np.log(total))[:, 0]
    return p, lse


def _float(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def _heads(q, k) -> tuple[int, int]:
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} kv heads")
    return heads, heads // kv_heads


def _cumulative(cu, name: str) -> np.ndarray:
    cu = np.asarray(cu)
    if cu.ndim != 1 or len(cu) < 1 or cu[0] != 0:
        raise ValueError(f"{name} must be a list that starts with 0, got {cu.tolist()}")
    if (np.diff(cu) < 0).any():
        raise ValueError(f"{name} decreases: {cu.tolist()}")
    return cu
