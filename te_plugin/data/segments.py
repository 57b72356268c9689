"""Segment arithmetic: cumulative lengths, restarting positions and labels of packed rows.

Terms: a segment is one document, or one piece of a long one, inside a packed row of tokens. `cu_seqlens` int32[N+1] are
cumulative real lengths; `cu_seqlens_padded` int32[N+1] are start offsets in memory, which differ where alignment leaves
gaps. All functions take anything NumPy can read (lists, arrays, CPU tensors) and return NumPy arrays.
"""

from __future__ import annotations

import numpy as np

IGNORED = -100  # label of a token that predicts nothing


def normalise_cu_seqlens(cu_seqlens) -> np.ndarray:
    """A cumulative list without fill values, as int32[N+1].

    Fixed-size lists from other data loaders end in -1: those entries are cut. Repeated entries are empty segments and
    stay. Raises ValueError for an empty list, a first entry that is not 0, a decreasing list, fill values that are not
    at the end.
    """
    cu = _integers(cu_seqlens, "cu_seqlens")
    if cu.ndim == 2 and cu.shape[0] == 1:
        cu = cu[0]
    if cu.ndim != 1:
        raise ValueError(
            f"cu_seqlens has shape {cu.shape}: give one list of N+1 entries (concatenate rows into one packed batch "
            "first)"
        )
    fill = cu == -1
    used = int(np.argmax(fill)) if fill.any() else cu.size
    if not fill[used:].all():
        raise ValueError(
            f"cu_seqlens {_short(cu)} has the fill value -1 in the middle: fill values may only end the list"
        )
    cu = cu[:used]
    if cu.size == 0 or cu[0] != 0:
        raise ValueError(f"cu_seqlens {_short(cu)} must start with 0")
    steps = np.diff(cu)
    if (steps < 0).any():
        at = int(np.argmax(steps < 0))
        raise ValueError(
            f"cu_seqlens decreases from {cu[at]} to {cu[at + 1]} at entry {at + 1}: it holds cumulative lengths, not "
            "lengths or offsets"
        )
    if cu[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"cu_seqlens ends at {cu[-1]}, more tokens than int32 can count: use fewer rows a batch")
    return cu.astype(np.int32)


def cu_seqlens_from_positions(position_ids) -> np.ndarray:
    """Boundaries of segments from restarting positions [S] or [B, S]: int32[N+1] over the B*S tokens laid end to end.

    A segment starts where the position is 0, and every row starts one. Padding with position 0 counts as segments of
    one token. Raises ValueError where a position neither goes on by one nor restarts at 0.
    """
    positions = np.atleast_2d(_integers(position_ids, "position_ids"))
    if positions.ndim != 2 or positions.shape[1] == 0:
        raise ValueError(f"position_ids has shape {positions.shape}: expected [S] or [B, S] with S > 0")
    starts = positions == 0
    broken = ~starts
    broken[:, 1:] &= positions[:, 1:] != positions[:, :-1] + 1
    if broken.any():
        row, column = (int(i) for i in np.argwhere(broken)[0])
        before = "the start of the row" if column == 0 else f"position {positions[row, column - 1]}"
        raise ValueError(
            f"position_ids[{row}, {column}] is {positions[row, column]} after {before}: positions must go on by 1 or "
            "restart at 0"
        )
    boundaries = np.flatnonzero(starts.reshape(-1))
    return np.append(boundaries, positions.size).astype(np.int32)


def cu_seqlens_from_segment_ids(segment_ids) -> np.ndarray:
    """Cumulative real lengths int32[N+1] from segment ids [S] or [B, S]; id 0 is padding and belongs to no segment.

    Where padding lies before another segment (a batch of rows), `cu_seqlens_padded_from_segment_ids` gives the start
    offsets. Raises ValueError where an id comes back after another one in a row: its two parts would count as one
    segment.
    """
    starts, ends, _ = _runs(segment_ids)
    return np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32)


def cu_seqlens_padded_from_segment_ids(segment_ids) -> np.ndarray:
    """Start offset of each segment in the tokens laid end to end, then the number of tokens: int32[N+1]."""
    starts, _, total = _runs(segment_ids)
    return np.append(starts, total).astype(np.int32)


def segment_positions(segment_ids) -> np.ndarray:
    """Position of each token inside its segment, same shape as segment_ids, int32; 0 on padding (id 0)."""
    ids = _integers(segment_ids, "segment_ids")
    starts, ends, total = _runs(ids)
    positions = np.zeros(total, np.int32)
    for start, end in zip(starts, ends, strict=True):
        positions[start:end] = np.arange(end - start)
    return positions.reshape(ids.shape)


def make_labels(tokens, cu_seqlens, cu_seqlens_padded=None) -> np.ndarray:
    """The next token of the same segment: int32[T]; -100 on the last token of every segment and outside segments.

    tokens [T]; cu_seqlens [N+1] real lengths; cu_seqlens_padded [N+1] start offsets where there are gaps (default:
    none).
    """
    tokens = _integers(tokens, "tokens")
    cu = normalise_cu_seqlens(cu_seqlens)
    starts = cu if cu_seqlens_padded is None else normalise_cu_seqlens(cu_seqlens_padded)
    if starts.size != cu.size:
        raise ValueError(
            f"cu_seqlens has {cu.size} entries and cu_seqlens_padded {starts.size}: both hold one entry a segment "
            "and an end"
        )
    lengths, places = np.diff(cu), np.diff(starts)
    for index in np.flatnonzero(lengths > places):
        raise ValueError(f"segment {index} has {lengths[index]} tokens in a place of {places[index]}")
    labels = np.full(tokens.shape, IGNORED, np.int32)
    for start, length in zip(starts[:-1], lengths, strict=True):
        if start + length > tokens.size:
            raise ValueError(f"a segment ends at token {start + length}, but there are {tokens.size} tokens")
        if length > 1:
            labels[start : start + length - 1] = tokens[start + 1 : start + length]
    return labels


def _runs(segment_ids) -> tuple[np.ndarray, np.ndarray, int]:
    """Start and end (in the flattened tokens) of every run of one id > 0, never across rows; and the number of
    tokens."""
    ids = np.atleast_2d(_integers(segment_ids, "segment_ids"))
    if ids.ndim != 2:
        raise ValueError(f"segment_ids has shape {ids.shape}: expected [S] or [B, S]")
    if (ids < 0).any():
        raise ValueError("segment_ids holds a negative id: ids are >= 1, and 0 for padding")
    edge = np.ones_like(ids, dtype=bool)
    edge[:, 1:] = ids[:, 1:] != ids[:, :-1]
    edges = np.append(np.flatnonzero(edge.reshape(-1)), ids.size)
    kept = ids.reshape(-1)[edges[:-1]] > 0 if ids.size else np.zeros(0, bool)
    starts, ends = edges[:-1][kept], edges[1:][kept]
    for row in range(ids.shape[0]):
        inside = (starts >= row * ids.shape[1]) & (starts < (row + 1) * ids.shape[1])
        seen, counts = np.unique(ids.reshape(-1)[starts[inside]], return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"segment id {seen[counts > 1][0]} appears in two places of row {row}: give every segment its own id"
            )
    return starts, ends, ids.size


def _integers(values, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}: expected integers")
    return array.astype(np.int64)


def _short(cu: np.ndarray) -> str:
    return str(cu.tolist()) if cu.size <= 12 else f"{cu[:8].tolist()} ... ({cu.size} entries)"
