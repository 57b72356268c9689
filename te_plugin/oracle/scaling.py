"""Quantise and dequantise: every granularity, row-major and transposed, and the state of delayed scaling.

The casts and the rule amax -> scale are numerics.py's, bit for bit; this file only says which elements share an amax.
x[R,C] gives scales of shape: tensor [1]; row [R]; block_1x128 [R, ceil(C/128)]; block_128x128 [ceil(R/128),
ceil(C/128)]; mx [R, ceil(C/32)] as E8M0 bytes (always powers of two). The transposed copy is the quantised transpose:
the same granularity along its own rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from te_plugin.numerics import BLOCK, E8M0, GRANULARITIES, MX_BLOCK, Fp8Format, scale_from_amax


@dataclass(frozen=True)
class Quantized:
    """data uint8[R,C] codes of `fmt`; scale_inv float32 (uint8 E8M0 for mx) in the shape its granularity says."""

    data: np.ndarray
    scale_inv: np.ndarray
    fmt: Fp8Format
    granularity: str


def quantize(x, fmt: Fp8Format, granularity: str = "tensor", pow2: bool = False) -> Quantized:
    """x[R,C] of any float dtype -> Quantized. Values are read as FP32, the widest type a kernel sees."""
    x = _matrix(x)
    amax = _block_amax(x, granularity)
    scale, scale_inv = scale_from_amax(amax, fmt, pow2=pow2 or granularity == "mx")
    with np.errstate(over="ignore", invalid="ignore"):
        data = fmt.encode(x * _spread(scale, x.shape, granularity))
    if granularity == "mx":
        scale_inv = E8M0.encode(scale_inv)
    return Quantized(data, scale_inv, fmt, granularity)


def quantize_transpose(x, fmt: Fp8Format, granularity: str = "tensor", pow2: bool = False) -> tuple[Quantized, Quantized]:
    """The row-major copy and the transposed one: quantize(x) and quantize(x^T)."""
    return quantize(x, fmt, granularity, pow2), quantize(np.asarray(x).T, fmt, granularity, pow2)


def quantize_with_scale(x, scale: float, fmt: Fp8Format) -> Quantized:
    """Quantise with a scale that is given (delayed scaling); values beyond max/scale saturate."""
    scale = np.float32(scale)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        data = fmt.encode(_matrix(x) * scale)
        scale_inv = np.asarray([np.float32(1) / scale], dtype=np.float32)
    return Quantized(data, scale_inv, fmt, "tensor")


def dequantize(quantized: Quantized) -> np.ndarray:
    """float64[R,C]: data * scale_inv. A kernel's FP32 result is this rounded once."""
    scale_inv = quantized.scale_inv
    if quantized.granularity == "mx":
        scale_inv = E8M0.decode(scale_inv)
    values = quantized.fmt.decode(quantized.data).astype(np.float64)
    return values * _spread(scale_inv.astype(np.float64), values.shape, quantized.granularity)


def amax_and_nonfinite(x) -> tuple[np.float32, int]:
    """(amax with NaN kept, number of NaN and infinite values); an empty tensor has amax 0."""
    x = np.abs(np.asarray(x).astype(np.float32))
    return np.float32(x.max(initial=0)), int(np.count_nonzero(~np.isfinite(x)))


class DelayedScaling:
    """Delayed scaling of one tensor: the scale comes from the amax of earlier steps.

    step(amax) returns the scale that this step used and then records the amax; a step in which the module does not run
    is simply not called, so history and scale stay. An amax of 0, NaN or infinity says nothing about the next step: the
    scale is kept, and a NaN or infinity is recorded as 0. step(a, b, ...) takes the amax of every member of an amax group and
    records the largest.
    compute: "max" over the history (length `window`) or "most_recent".
    """

    def __init__(self, fmt: Fp8Format, window: int = 1024, compute: str = "max", pow2: bool = False):
        if compute not in ("max", "most_recent"):
            raise ValueError(f"amax compute {compute!r} is not max or most_recent")
        self.fmt, self.compute, self.pow2 = fmt, compute, pow2
        self.history: deque[float] = deque(maxlen=window)
        self.scale = np.float32(1)
        self.scale_inv = np.float32(1)

    def step(self, *amax: float) -> np.float32:
        used = self.scale
        largest = float(np.max(np.asarray(amax, dtype=np.float32)))
        if not np.isfinite(largest):
            self.history.append(0.0)
            return used
        self.history.append(largest)
        chosen = np.max(self.history) if self.compute == "max" else self.history[-1]
        if chosen > 0:
            self.scale, self.scale_inv = scale_from_amax(chosen, self.fmt, self.pow2)
        return used


def _matrix(x) -> np.ndarray:
    x = np.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"quantise needs a matrix [R,C], got shape {list(x.shape)}")
    return x.astype(np.float32)


def _block_shape(shape: tuple[int, int], granularity: str) -> tuple[int, int]:
    rows, columns = max(shape[0], 1), max(shape[1], 1)
    shapes = {
        "tensor": (rows, columns),
        "row": (1, columns),
        "block_1x128": (1, BLOCK),
        "block_128x128": (BLOCK, BLOCK),
        "mx": (1, MX_BLOCK),
    }
    if granularity not in shapes:
        raise ValueError(f"granularity {granularity!r} is unknown; known: {', '.join(GRANULARITIES)}")
    return shapes[granularity]


def _block_amax(x: np.ndarray, granularity: str) -> np.ndarray:
    height, width = _block_shape(x.shape, granularity)
    if granularity == "tensor":
        return np.abs(x).max(initial=0).reshape(1)
    if granularity == "row":
        return np.abs(x).max(axis=1, initial=0)
    rows, columns = -(-x.shape[0] // height), -(-x.shape[1] // width)
    padded = np.zeros((rows * height, columns * width), dtype=np.float32)
    padded[: x.shape[0], : x.shape[1]] = np.abs(x)
    return padded.reshape(rows, height, columns, width).max(axis=(1, 3))


def _spread(scales: np.ndarray, shape: tuple[int, int], granularity: str) -> np.ndarray:
    """One scale an element, from one scale a block."""
    height, width = _block_shape(shape, granularity)
    if granularity == "tensor":
        return scales.reshape(1, 1)
    if granularity == "row":
        return scales.reshape(-1, 1)
    return np.repeat(np.repeat(scales, height, axis=0)[: shape[0]], width, axis=1)[:, : shape[1]]
