"""Segments of packed rows: how many a row may have, checked on the host before anything is compiled or run.

On the device a row with too many segments gives positions that every kernel refuses, so nothing is ever computed with some of
them missing; the check here is what turns that into a message.
"""

from __future__ import annotations

import inspect

import numpy as np

from te_plugin.maxtext.names import ATTENTION


def segments_of_rows(segment_ids: np.ndarray) -> np.ndarray:
    """int[B]: how many segments each row of ids[B,T] has; 0 is padding, equal neighbours are one segment."""
    ids = np.asarray(segment_ids)
    before = np.concatenate([np.zeros_like(ids[:, :1]), ids[:, :-1]], axis=1)
    return ((ids != before) & (ids != 0)).sum(axis=1)


def check_segments(segment_ids: np.ndarray, capacity: int) -> None:
    """ValueError when a row has more segments than max_segments_per_seq."""
    counts = segments_of_rows(segment_ids)
    if counts.size and counts.max() > capacity:
        row = int(counts.argmax())
        raise ValueError(
            f"row {row} of the batch holds {counts.max()} segments, and max_segments_per_seq={capacity} is "
            "the most that "
            f"attention={ATTENTION} was planned for; raise max_segments_per_seq to at least {counts.max()}"
        )


def wrap_loader(original, signature: inspect.Signature):
    """DataLoader.load_next_batch_pre_sharding that counts the segments of every batch."""

    def load(self):
        batch = original(self)
        if self.config.attention == ATTENTION and "inputs_segmentation" in batch:
            check_segments(_host(batch["inputs_segmentation"]), self.config.te_plugin_segment_capacity)
        return batch

    return load


def _host(ids) -> np.ndarray:
    """This process's rows. Batches come from the host, so nothing waits for a device's computation."""
    if isinstance(ids, np.ndarray) or not hasattr(ids, "addressable_shards") or ids.is_fully_addressable:
        return np.asarray(ids)
    return np.concatenate([np.asarray(shard.data) for shard in ids.addressable_shards])
