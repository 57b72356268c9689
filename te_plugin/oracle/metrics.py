"""How a kernel's result is compared with the reference: relative error, cosine, first differing index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """relative: ||a-b|| / ||b|| (absolute where the reference is 0). cosine: 1 where both are 0.

    first: index of the first element that is off by more than the bound allows for an element of typical size, or None.
    """

    relative: float
    cosine: float
    first: tuple[int, ...] | None
    got: float | None
    want: float | None

    def __str__(self) -> str:
        text = f"relative error {self.relative:.3e}, cosine {self.cosine:.6f}"
        if self.first is not None:
            text += f", first differing index {self.first}: got {self.got!r}, want {self.want!r}"
        return text


def compare(got, want, bound: float = 0.0) -> Comparison:
    """Compare arrays of one shape. A NaN or infinity in `got` that `want` lacks makes the relative error infinite.

    bound: the relative error that will be asked for; it sets how large a difference counts as the first differing index
    (8 * bound * the root mean square of `want`, so that ordinary rounding is not reported).
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {list(got.shape)}, want {list(want.shape)}")
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    finite = np.isfinite(want)
    size = np.sqrt(np.mean(want[finite] ** 2)) if finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        off = ~same & ~(np.abs(got - want) <= 8 * bound * size)
    first = tuple(int(i) for i in np.unravel_index(np.argmax(off), off.shape)) if off.any() else None
    if same.all():
        relative, cosine = 0.0, 1.0
    elif not (np.isfinite(got) | same).all() or not (finite | same).all():
        relative, cosine = float("inf"), 0.0
    else:
        a, b = got[finite], want[finite]
        norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
        relative = float(np.linalg.norm(a - b) / norm_b) if norm_b else float(norm_a)
        cosine = float(a @ b / (norm_a * norm_b)) if norm_a and norm_b else 0.0
    return Comparison(relative, cosine, first, *((float(got[first]), float(want[first])) if first is not None else (None, None)))
