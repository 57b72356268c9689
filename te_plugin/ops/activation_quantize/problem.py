"""The static facts of one SwiGLU, or of its gradient, whose output is wanted in FP8 only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin.ops.activation.problem import ActivationProblem
from te_plugin.ops.quantize.problem import QuantizeProblem


@dataclass(frozen=True)
class ActivationQuantizeProblem:
    """SwiGLU as ActivationProblem says, rounded to the dtype of `cast`, then quantised as `cast` says.

    cast: of the result, which has [rows, F] values, and [rows, 2F] with gradient: dy[rows, F] and x[rows, 2F] -> dx[rows, 2F].
    """

    op: ClassVar[str] = "activation_quantize"

    cast: QuantizeProblem
    gradient: bool = False

    @property
    def columns(self) -> int:
        """F."""
        return self.cast.columns // 2 if self.gradient else self.cast.columns

    def parts(self) -> tuple[tuple[str, ActivationProblem | QuantizeProblem], ...]:
        """(name, problem) of the two ops that this one joins."""
        return ("activation", ActivationProblem(self.cast.rows, self.columns, self.cast.dtype)), ("quantize", self.cast)
