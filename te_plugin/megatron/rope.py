"""Rotary embedding, applied inside core attention: its frequencies, and the positions of a context-parallel rank.

Megatron's own rotary module moves its table to CUDA and, for packed rows, copies cu_seqlens to the host for q and for k in
every layer. Here the positions are computed on the device from cu_seqlens (or come with the batch) and one kernel rotates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RopeOptions:
    """theta: base of the frequencies. factor != 1 turns on the scaling of Llama 3.1 with the three numbers after it."""

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @staticmethod
    def from_model(model) -> RopeOptions:
        """From a config.ModelConfig."""
        scaling = model.rope_scaling
        return RopeOptions(model.rope_theta, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor,
                           scaling.original_max_position)


def inverse_frequencies(head_dim: int, options: RopeOptions) -> np.ndarray:
    """float32[head_dim / 2]: theta^(-2i/head_dim), computed in float64 and rounded once.

    With scaling (Llama 3.1): wavelengths above original_max_position / low_freq_factor are stretched by factor, those below
    original_max_position / high_freq_factor stay, and between them the two are blended linearly in frequency.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embedding pairs the elements of a head: head_dim {head_dim} is odd; use an even head_dim")
    frequencies = options.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if options.factor != 1.0:
        if options.high_freq_factor <= options.low_freq_factor:
            raise ValueError(f"rope_scaling: high_freq_factor {options.high_freq_factor} must be larger than "
                             f"low_freq_factor {options.low_freq_factor}")
        turns = options.original_max_position * frequencies / (2 * math.pi)
        keep = (turns - options.low_freq_factor) / (options.high_freq_factor - options.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        frequencies = frequencies * (keep + (1.0 - keep) / options.factor)
    return frequencies.astype(np.float32)


def context_parallel_positions(cu_seqlens: list[int], cp_size: int, cp_rank: int, table: str = "per_segment") -> list[int]:
    """The rows of a rotary table that a context-parallel rank uses for its tokens, in order. Plain Python, for the host.

    Every segment is cut into 2*cp_size chunks; rank r owns chunks r and 2*cp_size-1-r. table="per_segment": the table is
    indexed by the position in the segment; table="packed": by the row in the packed batch (a table made per token).
    ValueError where a segment is no multiple of 2*cp_size, or cu_seqlens decreases.
    """
    if table not in ("per_segment", "packed"):
        raise ValueError(f"table={table!r} is not one of per_segment, packed")
    rows = []
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        chunk, rest = divmod(end - start, 2 * cp_size)
        if rest or chunk < 0:
            raise ValueError(f"a segment of {end - start} tokens cannot be cut into {2 * cp_size} chunks; pad segments to a "
                             f"multiple of {2 * cp_size} (2 * context_parallel)")
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            origin = start if table == "packed" else 0
            rows += range(origin + index * chunk, origin + (index + 1) * chunk)
    return rows
