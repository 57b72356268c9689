"""Packing documents into rows of a fixed number of tokens.

Two steps. `plan_rows` decides how lengths share rows: best-fit decreasing, run on the histogram of lengths, so its cost
depends on the number of different lengths and not on the number of documents, and the number of rows is the same in
every epoch. `deal` then puts documents into the places of their length, at random by (seed, epoch) or in input order.
Both are pure functions, on every machine and every NumPy version: random order comes from hashed indices, not from a
generator's stream.

A document longer than a row is cut into pieces; each piece is a segment of its own with positions from 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from te_plugin.data.errors import DataError


@dataclass(frozen=True)
class Pack:
    """One packed row: n segments, in order. The row tail after the last segment is padding."""

    documents: np.ndarray  # int64[n], index into `lengths` of each segment's document
    offsets: np.ndarray  # int64[n], first token of the segment in its document (not 0 for later pieces of a long one)
    cu_seqlens: np.ndarray  # int32[n+1], cumulative real lengths
    cu_seqlens_padded: np.ndarray  # int32[n+1], start offset in the row, last entry: end of the last segment
    positions: np.ndarray  # int32[seq_len], restarting in every segment, 0 on padding


@dataclass(frozen=True)
class Pieces:
    """Segments to place: document, offset in it, real length, and length rounded up to the alignment. All int64[P]."""

    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    padded: np.ndarray

    def __len__(self) -> int:
        return self.length.size


@dataclass(frozen=True)
class RowPlan:
    """Places by length, for a given multiset of lengths: slot_row int64[P] is the row of each place, places sorted by
    padded length."""

    slot_row: np.ndarray
    rows: int


@dataclass(frozen=True)
class RowOrder:
    """An epoch: pieces[row_start[r]:row_start[r+1]] are the segments of row r, in order."""

    pieces: np.ndarray  # int64[P]
    row_start: np.ndarray  # int64[rows+1]


def pack(lengths, seq_len: int, multiple: int = 1, cp: int = 1, max_segments: int | None = None) -> list[Pack]:
    """Pack documents of `lengths` tokens into rows of seq_len, in input order where the fit allows.

    multiple: every segment starts at and is padded to a multiple of it; cp: and of 2*cp, so that context-parallel ranks
    can cut it into 2*cp chunks. max_segments: at most so many segments a row. Every token of every document is placed
    exactly once. Raises DataError for a length < 1 or sizes that cannot work.
    """
    pieces = cut_into_pieces(lengths, seq_len, alignment(multiple, cp))
    plan = plan_rows(pieces.padded, seq_len, max_segments)
    order = deal(pieces.padded, plan)
    return [
        _make_pack(pieces, order.pieces[a:b], seq_len)
        for a, b in zip(order.row_start[:-1], order.row_start[1:], strict=True)
    ]


def alignment(multiple: int, cp: int) -> int:
    """The multiple that every segment's place in memory must have."""
    if multiple < 1 or cp < 1:
        raise DataError(f"multiple={multiple}, cp={cp}: both must be at least 1")
    return math.lcm(multiple, 2 * cp if cp > 1 else 1)


def cut_into_pieces(lengths, seq_len: int, align: int = 1) -> Pieces:
    """One piece a document, or several where it is longer than a row."""
    lengths = np.asarray(lengths)
    if lengths.size and lengths.dtype.kind not in "iu":
        raise DataError(f"lengths have dtype {lengths.dtype}: expected integers")
    lengths = lengths.astype(np.int64).reshape(-1)
    for document in np.flatnonzero(lengths < 1)[:1]:
        raise DataError(f"document {document} has {lengths[document]} tokens: remove empty documents")
    if seq_len < align or seq_len % align:
        raise DataError(
            f"seq_len={seq_len} is no multiple of the alignment {align} of segments: choose a multiple of {align}"
        )
    count = -(-lengths // seq_len)
    document = np.repeat(np.arange(lengths.size), count)
    first = np.concatenate([[0], np.cumsum(count)])[:-1]
    offset = (np.arange(document.size) - first[document]) * seq_len
    length = np.minimum(lengths[document] - offset, seq_len)
    return Pieces(document=document, offset=offset, length=length, padded=-(-length // align) * align)


def plan_rows(padded: np.ndarray, seq_len: int, max_segments: int | None = None) -> RowPlan:
    """Best-fit decreasing over the histogram of padded lengths: each goes into the fullest row that still has room for
    it."""
    if max_segments is not None and max_segments < 1:
        raise DataError(f"max_segments={max_segments}: a row needs at least one segment")
    most = max_segments or seq_len
    values, counts = np.unique(padded, return_counts=True)
    open_rows: dict[
        int, list[tuple[int, int, tuple]]
    ] = {}  # free tokens -> [(rows, segments, ((length, how many), ...))]
    frees: list[int] = []  # sorted keys of open_rows
    closed: list[tuple[int, tuple]] = []

    def put(rows: int, free: int, segments: int, runs: tuple) -> None:
        if rows == 0:
            return
        if free == 0 or segments == most:
            closed.append((rows, runs))
            return
        if free not in open_rows:
            open_rows[free] = []
            insort(frees, free)
        open_rows[free].append((rows, segments, runs))

    for length, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            at = bisect_left(frees, length)
            if at < len(frees):
                free = frees[at]
                rows, segments, runs = open_rows[free].pop()
                if not open_rows[free]:
                    del open_rows[free]
                    frees.pop(at)
            else:
                free, segments, runs = seq_len, 0, ()
                rows = left  # as many as it takes; unused ones are not kept
            each = min(free // length, most - segments)
            full = min(rows, left // each)
            put(full, free - each * length, segments + each, runs + ((length, each),))
            left -= full * each
            used = full
            if left and used < rows:  # fewer left than one more row could take
                put(1, free - left * length, segments + left, runs + ((length, left),))
                left, used = 0, used + 1
            if runs:
                put(rows - used, free, segments, runs)
    for free in frees:
        closed.extend((rows, runs) for rows, _, runs in open_rows[free])
    return _places(closed, padded.size)


def _places(patterns: list[tuple[int, tuple]], total: int) -> RowPlan:
    row_parts, length_parts, next_row = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for rows, runs in patterns:
        numbers = np.arange(next_row, next_row + rows)
        next_row += rows
        for length, each in runs:
            row_parts.append(np.repeat(numbers, each))
            length_parts.append(np.full(rows * each, length, np.int64))
    row, length = np.concatenate(row_parts), np.concatenate(length_parts)
    assert row.size == total, "every piece has exactly one place"
    return RowPlan(slot_row=row[np.argsort(length, kind="stable")], rows=next_row)


def deal(padded: np.ndarray, plan: RowPlan, key: tuple[int, ...] | None = None) -> RowOrder:
    """Give every piece a place of its length. key None: input order; else a random order that depends on the key's
    integers only."""
    count = padded.size
    piece_key = np.arange(count, dtype=np.uint64) if key is None else hashed(count, *key, 1)
    by_length = np.lexsort((piece_key, padded))
    row = np.empty(count, np.int64)
    row[by_length] = plan.slot_row
    if key is None:  # rows in the order of their first piece
        first = np.full(plan.rows, count, np.int64)
        np.minimum.at(first, row, np.arange(count))
        row_key, inside_key = first, piece_key
    else:
        row_key, inside_key = hashed(plan.rows, *key, 2), hashed(count, *key, 3)
    rank = np.empty(plan.rows, np.int64)
    rank[np.argsort(row_key, kind="stable")] = np.arange(plan.rows)
    row = rank[row]
    return RowOrder(
        pieces=np.lexsort((inside_key, row)),
        row_start=np.concatenate([[0], np.cumsum(np.bincount(row, minlength=plan.rows))]),
    )


def hashed(count: int, *key: int) -> np.ndarray:
    """uint64[count] of well mixed numbers that depend on the index and the key only (splitmix64)."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state ^ np.uint64(part % 2**64))
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + state)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _make_pack(pieces: Pieces, chosen: np.ndarray, seq_len: int) -> Pack:
    lengths, starts = pieces.length[chosen], np.concatenate([[0], np.cumsum(pieces.padded[chosen])])
    positions = np.zeros(seq_len, np.int32)
    for start, length in zip(starts[:-1], lengths, strict=True):
        positions[start : start + length] = np.arange(length)
    return Pack(
        documents=pieces.document[chosen],
        offsets=pieces.offset[chosen],
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        cu_seqlens_padded=starts.astype(np.int32),
        positions=positions,
    )
