"""The static facts of one SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ActivationProblem:
    """x[rows, 2*columns] = [gate | up] -> y[rows, columns] = silu(gate) * up."""

    op: ClassVar[str] = "activation"

    rows: int
    columns: int
    dtype: str = "bf16"
    needs_backward: bool = True
