"""The static facts of one quantisation of a list of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from te_plugin.ops.quantize.problem import QuantizeProblem


@dataclass(frozen=True)
class QuantizeManyProblem:
    """A list of tensors of one dtype, each quantised as QuantizeProblem says.

    shapes: (rows, columns, how many tensors of that shape), sorted: the order of the list changes nothing (see `of`).
    """

    op: ClassVar[str] = "quantize_many"

    shapes: tuple[tuple[int, int, int], ...]
    dtype: str = "bf16"
    format: str = "e4m3"
    granularity: str = "tensor"
    pow2_scale: bool = False
    transpose: bool = False
    delayed: bool = False

    def __post_init__(self):
        self.parts()  # their ValueErrors name a wrong format or granularity

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, int]], *facts) -> QuantizeManyProblem:
        """The problem of a list of (rows, columns)."""
        return cls(tuple((*shape, count) for shape, count in sorted(Counter(shapes).items())), *facts)

    def parts(self) -> tuple[tuple[str, QuantizeProblem], ...]:
        """("quantize", problem) of each shape."""
        return tuple(("quantize", QuantizeProblem(rows, columns, self.dtype, self.format, self.granularity, self.pow2_scale,
                                                  self.transpose, self.delayed)) for rows, columns, _ in self.shapes)
