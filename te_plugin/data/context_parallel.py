"""Splitting packed segments over context-parallel ranks.

Causal attention makes late rows dearer than early ones, so each segment is cut into 2*cp equal chunks of its padded
length and rank r takes chunks r and 2*cp-1-r: every rank gets the same number of rows and the same work. Padding sits
at the end of a segment, so the real tokens of a rank are not real/cp: they are counted chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from te_plugin.data.segments import normalise_cu_seqlens


@dataclass(frozen=True)
class CpShard:
    """What one rank holds. Its real tokens are a prefix of each local segment, so the two lists describe them as in an
    unsplit batch."""

    rows: np.ndarray  # int64[T/cp], index of each local row in the unsplit tokens
    cu_seqlens: np.ndarray  # int32[N+1], cumulative real tokens of this rank
    cu_seqlens_padded: np.ndarray  # int32[N+1], start of each segment in the local rows
    positions: np.ndarray  # int32[T/cp], position in the whole segment


def split_for_cp(cu_seqlens, cu_seqlens_padded, cp: int, rank: int) -> CpShard:
    """The load-balanced share of `rank` out of `cp`.

    cu_seqlens [N+1] real lengths; cu_seqlens_padded [N+1] start offsets. Raises ValueError when a padded segment is no
    multiple of 2*cp, when a segment is longer than its padded length, or for a rank outside 0..cp-1.
    """
    if cp < 1 or not 0 <= rank < cp:
        raise ValueError(f"context-parallel rank {rank} of {cp} does not exist: ranks are 0 to cp-1")
    real = np.diff(normalise_cu_seqlens(cu_seqlens)).astype(np.int64)
    starts = normalise_cu_seqlens(cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).astype(np.int64)
    padded = np.diff(starts)
    if real.size != padded.size:
        raise ValueError(f"cu_seqlens describes {real.size} segments and cu_seqlens_padded {padded.size}")
    chunks = 2 * cp if cp > 1 else 1
    for index in np.flatnonzero(padded % chunks):
        raise ValueError(
            f"segment {index} takes {padded[index]} tokens, no multiple of 2*cp = {chunks}: pad it to "
            f"{-(-padded[index] // chunks) * chunks} (pack(..., cp={cp}) does)"
        )
    for index in np.flatnonzero(real > padded):
        raise ValueError(f"segment {index} has {real[index]} tokens in a place of {padded[index]}")

    pieces = (0,) if cp == 1 else (rank, 2 * cp - 1 - rank)
    rows, positions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    local_real = np.zeros(real.size, np.int64)
    for index, (start, length, size) in enumerate(zip(starts[:-1], real, padded, strict=True)):
        chunk = size // chunks
        for piece in pieces:
            inside = np.arange(piece * chunk, (piece + 1) * chunk)
            rows.append(start + inside)
            positions.append(inside)
            local_real[index] += np.clip(length - piece * chunk, 0, chunk)
    return CpShard(
        rows=np.concatenate(rows),
        cu_seqlens=_cumulative(local_real),
        cu_seqlens_padded=_cumulative(padded // cp),
        positions=np.concatenate(positions).astype(np.int32),
    )


def rope_indices(cu_seqlens, cp_size: int = 1, cp_rank: int = 0, table: str = "per_segment") -> np.ndarray:
    """Rows of a rotary frequency table for the tokens of one context-parallel rank: int64[T/cp].

    table "per_segment": the table has a row a position, and every segment starts again at row 0. table "packed": the
    table was already gathered for the packed tokens and has a row a token; later segments must not re-use the rows of
    the first one.
    """
    shard = split_for_cp(cu_seqlens, cu_seqlens, cp_size, cp_rank)
    if table == "packed":
        return shard.rows
    if table == "per_segment":
        return shard.positions.astype(np.int64)
    raise ValueError(f"table={table!r} is unknown: use 'packed' (a row a token) or 'per_segment' (a row a position)")


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
