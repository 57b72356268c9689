"""The static facts of a QKV split + rotary embedding whose output is wanted in FP8 only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin.ops.qkv_rope.problem import QkvRopeProblem
from te_plugin.ops.quantize.problem import QuantizeProblem


@dataclass(frozen=True)
class QkvRopeQuantizeProblem:
    """As QkvRopeProblem, rounded to `dtype`, then q, k and v quantised to `format` with one scale each; v transposed as well.

    delayed: the three scales are given, not computed. There is no backward: the gradients of q, k and v are not quantised here
    (op "qkv_rope").
    """

    op: ClassVar[str] = "qkv_rope_quantize"

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str = "split"
    dtype: str = "bf16"
    format: str = "e4m3"
    pow2_scale: bool = False
    delayed: bool = False

    def __post_init__(self):
        self.parts()  # their ValueErrors name what is wrong

    def parts(self) -> tuple[tuple[str, QkvRopeProblem | QuantizeProblem], ...]:
        """(name, problem) of the ops that this one joins."""
        cast = lambda heads, transpose: QuantizeProblem(  # noqa: E731
            self.tokens, heads * self.head_dim, self.dtype, self.format, "tensor", self.pow2_scale, transpose, self.delayed)
        return (("qkv_rope", QkvRopeProblem(self.tokens, self.heads, self.kv_heads, self.head_dim, self.layout, self.dtype)),
                ("quantize_q", cast(self.heads, False)), ("quantize_k", cast(self.kv_heads, False)),
                ("quantize_v", cast(self.kv_heads, True)))
