"""Rotary embedding, applied inside core attention: its frequencies.

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
    if not (options.theta > 0 and options.factor > 0):
        raise ValueError(f"rotary embedding: theta {options.theta} and factor {options.factor} must be above 0")
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
