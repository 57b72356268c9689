"""The static facts of splitting a QKV projection's output into heads and rotating q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin.ops.rope.problem import RopeProblem

LAYOUT_CODE = {"split": 0, "grouped": 1}


@dataclass(frozen=True)
class QkvRopeProblem:
    """qkv[tokens, (heads + 2*kv_heads) * head_dim] -> q[tokens, heads, head_dim], k and v[tokens, kv_heads, head_dim].

    q and k are rotated as by the op "rope", v is copied. Backward: dq, dk, dv -> dqkv, rotated back.
    layout: the order of the heads in a row of qkv. "split": all of q, then k, then v. "grouped" (Megatron): for each kv head its
    heads/kv_heads heads of q, then the one of k, then the one of v.
    """

    op: ClassVar[str] = "qkv_rope"

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str = "split"
    dtype: str = "bf16"

    def __post_init__(self):
        if self.layout not in LAYOUT_CODE:
            raise ValueError(f"layout={self.layout!r} is not one of {', '.join(LAYOUT_CODE)}")
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a positive multiple of kv_heads={self.kv_heads}: "
                             f"every kv head serves as many heads of q")
        self.parts()  # its ValueError names an odd head_dim

    def parts(self) -> tuple[tuple[str, RopeProblem], ...]:
        """(name, problem) of the rotations that the fused kernel replaces."""
        return tuple((f"rope_{name}", RopeProblem(self.tokens, heads, self.head_dim, self.dtype))
                     for name, heads in (("q", self.heads), ("k", self.kv_heads)))
