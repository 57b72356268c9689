"""The static facts of one cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class LossProblem:
    """logits[tokens, vocab], labels[tokens] (-100: no loss) -> loss[tokens] in FP32."""

    op: ClassVar[str] = "loss"

    tokens: int
    vocab: int
    dtype: str = "bf16"
    needs_backward: bool = True
