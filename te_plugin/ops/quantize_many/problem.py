"""The static facts of one quantisation of a list of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from te_plugin.ops.quantize.problem import QuantizeProblem


@dataclass(frozen=True)
class QuantizeManyProblem:
    """A list of tensors that are quantised in one way: their problems differ in rows and columns only.

    casts: (problem, how many tensors it is of), sorted: the order of the list changes nothing (see `of`).
    """

    op: ClassVar[str] = "quantize_many"

    casts: tuple[tuple[QuantizeProblem, int], ...]

    def __post_init__(self):
        ways = {replace(cast, rows=0, columns=0) for cast, _ in self.casts}
        if len(ways) != 1:
            raise ValueError(f"quantize_many quantises one or more tensors in one way; asked for {len(ways)}: {self.casts}")

    @classmethod
    def of(cls, casts: Iterable[QuantizeProblem]) -> QuantizeManyProblem:
        """The problem of a list, from that of each tensor."""
        return cls(tuple(sorted(Counter(casts).items(), key=lambda counted: (counted[0].rows, counted[0].columns))))

    @property
    def cast(self) -> QuantizeProblem:
        """One of them; all but rows and columns is that of every tensor."""
        return self.casts[0][0]

    def parts(self) -> tuple[tuple[str, QuantizeProblem], ...]:
        """("quantize", problem) of each shape."""
        return tuple(("quantize", cast) for cast, _ in self.casts)
