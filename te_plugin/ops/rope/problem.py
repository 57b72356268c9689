"""The static facts of one rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RopeProblem:
    """x[tokens, heads, head_dim] rotated by positions[tokens] * inv_freq[head_dim/2]; pairs are (i, i + head_dim/2)."""

    op: ClassVar[str] = "rope"

    tokens: int
    heads: int
    head_dim: int
    dtype: str = "bf16"

    def __post_init__(self):
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding rotates pairs")
