"""Packed rows of te_plugin.data as the arrays that MaxText's loss takes. NumPy only."""

from __future__ import annotations

import numpy as np

BATCH_KEYS = ("inputs", "inputs_position", "inputs_segmentation", "targets", "targets_position", "targets_segmentation")


def maxtext_rows(batch) -> dict[str, np.ndarray]:
    """A data.Batch as the arrays [B,T] that MaxText's loss takes: segment ids 1, 2, ... a row, 0 for padding."""
    rows, total = batch.rows, len(batch.tokens)
    seq_len = total // rows
    segmentation = np.zeros(total, np.int32)
    lengths, starts = np.diff(batch.cu_seqlens), batch.cu_seqlens_padded[:-1]
    number, row_before = 0, -1
    for start, length in zip(starts, lengths, strict=True):
        if length == 0:
            continue
        row = start // seq_len
        number = number + 1 if row == row_before else 1
        row_before = row
        segmentation[start : start + length] = number
    predicted = batch.labels >= 0
    flat = {
        "inputs": batch.tokens,
        "inputs_position": batch.positions,
        "inputs_segmentation": segmentation,
        "targets": np.where(predicted, batch.labels, 0).astype(np.int32),
        "targets_position": batch.positions,
        "targets_segmentation": np.where(predicted, np.maximum(segmentation, 1), 0).astype(np.int32),
    }
    return {key: value.reshape(rows, seq_len) for key, value in flat.items()}
