"""The static facts of a QKV split + rotary embedding whose output is wanted in FP8 only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin.ops.qkv_rope.problem import QkvRopeProblem
from te_plugin.ops.quantize.problem import QuantizeProblem


@dataclass(frozen=True)
class QkvRopeQuantizeProblem:
    """q, k and v of `split`, rounded to its dtype, then quantised to `format` with one scale each; v transposed as well.

    delayed: the three scales are given, not computed. There is no backward: the gradients of q, k and v are not quantised here
    (op "qkv_rope").
    """

    op: ClassVar[str] = "qkv_rope_quantize"

    split: QkvRopeProblem
    format: str = "e4m3"
    pow2_scale: bool = False
    delayed: bool = False

    def __post_init__(self):
        self.parts()  # their ValueErrors name a wrong format

    def parts(self) -> tuple[tuple[str, QkvRopeProblem | QuantizeProblem], ...]:
        """(name, problem) of the ops that this one joins."""
        split = self.split
        cast = lambda heads, transpose: QuantizeProblem(  # noqa: E731
            split.tokens, heads * split.head_dim, split.dtype, self.format, "tensor", self.pow2_scale, transpose, self.delayed)
        return (("qkv_rope", split), ("quantize_q", cast(split.heads, False)), ("quantize_k", cast(split.kv_heads, False)),
                ("quantize_v", cast(split.kv_heads, True)))
