"""Context parallelism: which rows of a packed batch a rank owns, and how partial attention is merged.

A segment, padded to a multiple of 2*cp rows, is cut into 2*cp equal chunks; rank r owns chunks r and 2*cp-1-r, so that
causal work is balanced. Padding lies at a segment's end. A rank sees the keys of the others chunk by chunk; each gives
a partial (out, lse), and the merge is exact.
"""

from __future__ import annotations

import numpy as np

from te_plugin.oracle.attention import segment_table, softmax, visible_keys


def rank_rows(cu_padded, cp: int, rank: int) -> np.ndarray:
    """Row indices of the padded batch that a rank owns, segment by segment.

    ValueError for a padded length that is no multiple of 2*cp.
    """
    rows = []
    for n, (begin, end) in enumerate(zip(cu_padded[:-1], cu_padded[1:], strict=True)):
        rows += [np.arange(a, b) for a, b in _chunks(int(begin), int(end), cp, rank, n)]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def real_lengths(cu_real, cu_padded, cp: int, rank: int) -> list[int]:
    """Real (not padding) tokens of each segment on a rank."""
    lengths = []
    for n in range(len(cu_padded) - 1):
        begin, end = int(cu_padded[n]), int(cu_padded[n + 1])
        last = begin + int(cu_real[n + 1] - cu_real[n])
        lengths.append(sum(max(0, min(b, last) - a) for a, b in _chunks(begin, end, cp, rank, n)))
    return lengths


def merge_partial(partials) -> tuple[np.ndarray, np.ndarray]:
    """[(out[Tq,H,D], lse[H,Tq]), ...] over disjoint sets of keys -> (out, lse) over their union; -inf means no key."""
    outs = np.stack([np.asarray(out, dtype=np.float64) for out, _ in partials])
    lses = np.stack([np.asarray(lse, dtype=np.float64) for _, lse in partials])
    top = lses.max(axis=0)
    safe = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(lses - safe)
    total = weights.sum(axis=0)
    share = np.where(total > 0, weights / np.where(total > 0, total, 1), 0.0)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, safe + np.log(np.where(total > 0, total, 1)), -np.inf)
    return np.einsum("pht,pthd->thd", share, outs), lse


def attention_context_parallel(
    q, k, v, cu_real, cu_padded, cp: int, *, mask="causal", window=None, scale=None
) -> tuple[np.ndarray, np.ndarray]:
    """Emulated ring: every rank's queries against every rank's keys, merged; equals cp = 1.

    Returns (out, lse) of all rows.
    """
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    for rank in range(cp):
        mine = rank_rows(cu_padded, cp, rank)
        partials = [
            ring_attention(
                q,
                k,
                v,
                cu_real,
                cu_padded,
                mine,
                rank_rows(cu_padded, cp, other),
                mask=mask,
                window=window,
                scale=scale,
            )
            for other in range(cp)
        ]
        out[mine], lse[:, mine] = merge_partial(partials)
    return out, lse


def ring_attention(q, k, v, cu_real, cu_padded, q_rows, k_rows, *, mask="causal", window=None, scale=None):
    """Partial (out[len(q_rows),H,D], lse[H,len(q_rows)]) of some query rows over some key rows of the whole batch."""
    heads, ratio = q.shape[1], q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out, lse = np.zeros((len(q_rows), heads, v.shape[2])), np.full((heads, len(q_rows)), -np.inf)
    for s in segment_table(cu_real, None, cu_padded, cu_padded, q_rows=len(q), k_rows=len(k), mask=mask):
        seen = visible_keys(s.q_len, s.k_len, mask, window)
        mine = np.flatnonzero((q_rows >= s.q_begin) & (q_rows < s.q_end))
        theirs = np.flatnonzero((k_rows >= s.k_begin) & (k_rows < s.k_end))
        if not len(mine) or not len(theirs):
            continue
        rows, keys = q_rows[mine], k_rows[theirs]
        part = seen[np.ix_(rows - s.q_begin, keys - s.k_begin)]
        for h in range(heads):
            scores = q[rows, h].astype(np.float64) @ k[keys, h // ratio].astype(np.float64).T * scale
            p, lse[h, mine] = softmax(scores, part)
            out[mine, h] = p @ v[keys, h // ratio].astype(np.float64)
    return out, lse


def _chunks(begin: int, end: int, cp: int, rank: int, n: int) -> list[tuple[int, int]]:
    if (end - begin) % (2 * cp):
        raise ValueError(f"segment {n} has {end - begin} padded rows, no multiple of 2*cp = {2 * cp}: pad it before splitting")
    size = (end - begin) // (2 * cp)
    return [(begin + c * size, begin + (c + 1) * size) for c in (rank, 2 * cp - 1 - rank)]
