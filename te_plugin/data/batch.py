"""Batches: packed rows (THD), and the same segments one a row (BSHD). NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from te_plugin.data.errors import DataError
from te_plugin.data.segments import IGNORED


@dataclass(frozen=True)
class Batch:
    """`rows` packed rows of seq_len tokens laid end to end: T = rows*seq_len.

    Segments fill the first entries; the capacity N = rows*max_segments is fixed so that shapes never change. Tokens of
    a gap or a row tail belong to no segment: label -100, position 0.
    """

    tokens: np.ndarray  # int32[T]
    labels: np.ndarray  # int32[T], -100 where nothing is predicted (document ends, padding)
    positions: np.ndarray  # int32[T], restart per segment
    cu_seqlens: np.ndarray  # int32[N+1], cumulative real lengths; unused entries repeat the last value
    cu_seqlens_padded: np.ndarray  # int32[N+1], start offset of each segment; unused entries and the last one are T
    doc_ids: np.ndarray  # int64[N], document of each segment, -1 unused
    rows: int

    @property
    def segments(self) -> int:
        """Segments in use."""
        return int((self.doc_ids >= 0).sum())

    @property
    def loss_tokens(self) -> int:
        """Tokens that predict something."""
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True)
class PaddedBatch:
    """One segment a row, padded at the end to S tokens: label -100 and position 0 there."""

    tokens: np.ndarray  # int32[B, S]
    labels: np.ndarray  # int32[B, S]
    positions: np.ndarray  # int32[B, S]
    lengths: np.ndarray  # int32[B]


def to_bshd(batch: Batch, seq_len: int, pad_id: int = 0) -> PaddedBatch:
    """The segments of a packed batch, in the same order, one a row of seq_len tokens.

    Raises DataError when a segment is longer than seq_len: nothing is cut.
    """
    count = batch.segments
    lengths = np.diff(batch.cu_seqlens[: count + 1])
    if count and lengths.max() > seq_len:
        raise DataError(f"a segment of {lengths.max()} tokens does not fit a padded row of {seq_len}: raise seq_len")
    tokens = np.full((count, seq_len), pad_id, np.int32)
    labels = np.full((count, seq_len), IGNORED, np.int32)
    positions = np.zeros((count, seq_len), np.int32)
    for row, (start, length) in enumerate(zip(batch.cu_seqlens_padded[:count], lengths, strict=True)):
        place = slice(start, start + length)
        tokens[row, :length] = batch.tokens[place]
        labels[row, :length] = batch.labels[place]
        positions[row, :length] = batch.positions[place]
    return PaddedBatch(tokens=tokens, labels=labels, positions=positions, lengths=lengths.astype(np.int32))
