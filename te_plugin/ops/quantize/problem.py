"""The static facts of one quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_plugin import numerics


@dataclass(frozen=True)
class QuantizeProblem:
    """x[rows, columns] of `dtype` -> FP8 `format` with scales per `granularity`.

    transpose: the transposed copy is written from the same read. delayed: the scale is given, not computed.
    """

    op: ClassVar[str] = "quantize"

    rows: int
    columns: int
    dtype: str = "bf16"
    format: str = "e4m3"
    granularity: str = "tensor"
    pow2_scale: bool = False
    transpose: bool = False
    delayed: bool = False

    def __post_init__(self):
        check_format(self.format)
        check_granularity(self.granularity)
        if self.delayed and self.granularity != "tensor":
            raise ValueError(f"a given scale is per tensor; granularity is {self.granularity!r}")

    @classmethod
    def of_operand(cls, rows: int, columns: int, dtype: str, kind: numerics.Scaling, operand: str, pow2: bool,
                   transpose: bool) -> QuantizeProblem:
        """An operand ("activation", "weight" or "gradient") of a linear layer. pow2: where the scaling computes its scales."""
        return cls(rows, columns, dtype, kind.format(operand).name, getattr(kind, operand), pow2 and not kind.delayed, transpose,
                   kind.delayed)

    def scale_shape(self) -> tuple[int, ...]:
        """Shape of scale_inv of the row-major copy (uint8 exponents for mx, else fp32)."""
        return scale_shape(self.rows, self.columns, self.granularity)


def check_format(name: str) -> None:
    if name not in numerics.FORMATS:
        raise ValueError(f"FP8 format {name!r} is not one of {', '.join(numerics.FORMATS)}")


def check_granularity(name: str) -> None:
    if name not in numerics.GRANULARITIES:
        raise ValueError(f"granularity {name!r} is not one of {', '.join(numerics.GRANULARITIES)}")


def scale_shape(rows: int, columns: int, granularity: str) -> tuple[int, ...]:
    up = lambda n, block: -(-n // block)  # noqa: E731
    return {
        "tensor": (1,),
        "row": (rows,),
        "block_1x128": (rows, up(columns, numerics.BLOCK)),
        "block_128x128": (up(rows, numerics.BLOCK), up(columns, numerics.BLOCK)),
        "mx": (rows, up(columns, numerics.MX_BLOCK)),
    }[granularity]
