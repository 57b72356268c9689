"""The static facts of one SwiGLU, or of its gradient, whose output is wanted in FP8 only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin.ops.activation.problem import ActivationProblem
from te_plugin.ops.quantize.problem import QuantizeProblem


@dataclass(frozen=True)
class ActivationQuantizeProblem:
    """Forward: x[rows, 2*columns] = [gate | up] -> silu(gate) * up [rows, columns], rounded to `dtype`, then quantised.

    gradient: dy[rows, columns] and x -> dx[rows, 2*columns], quantised. `format` and `granularity` are those of the result.
    """

    op: ClassVar[str] = "activation_quantize"

    rows: int
    columns: int
    gradient: bool = False
    dtype: str = "bf16"
    format: str = "e4m3"
    granularity: str = "tensor"
    pow2_scale: bool = False
    transpose: bool = False
    delayed: bool = False

    def __post_init__(self):
        self.parts()  # their ValueErrors name a wrong format or granularity

    def parts(self) -> tuple[tuple[str, ActivationProblem | QuantizeProblem], ...]:
        """(name, problem) of the two ops that this one joins."""
        width = 2 * self.columns if self.gradient else self.columns
        return (("activation", ActivationProblem(self.rows, self.columns, self.dtype)),
                ("quantize", QuantizeProblem(self.rows, width, self.dtype, self.format, self.granularity, self.pow2_scale,
                                             self.transpose, self.delayed)))
