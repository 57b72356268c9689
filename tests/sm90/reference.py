"""NumPy references of the Hopper kernels: quantisation bit by bit from te_plugin.numerics, the rest in float64."""

from __future__ import annotations

import numpy as np

from te_plugin import numerics
from te_plugin.numerics import GRANULARITY_CODE, MX_BLOCK


def expand(scales: np.ndarray, granularity: str, rows: int, cols: int) -> np.ndarray:
    """Scales of a granularity -> one a value, [rows, cols]."""
    if granularity == "tensor":
        return np.broadcast_to(scales.reshape(1, 1), (rows, cols))
    if granularity == "row":
        return np.broadcast_to(scales[:, None], (rows, cols))
    if granularity == "block_1x128":
        return np.repeat(scales, 128, axis=1)[:, :cols]
    if granularity == "block_128x128":
        return np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:rows, :cols]
    return np.repeat(scales, MX_BLOCK, axis=1)[:, :cols]


def amax_of(x: np.ndarray, granularity: str) -> np.ndarray:
    """NaN-keeping maxima of |x| in the shape of the granularity's scales."""
    rows, cols = x.shape
    height, width = {
        "tensor": (rows, cols),
        "row": (1, cols),
        "block_1x128": (1, 128),
        "block_128x128": (128, 128),
        "mx": (1, MX_BLOCK),
    }[granularity]
    up = lambda n, b: -(-n // b) * b
    padded = np.zeros((up(rows, height), up(cols, width)), np.float32)
    padded[:rows, :cols] = np.abs(x)
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    out = np.max(blocks, axis=(1, 3))  # np.max keeps NaN
    return out.reshape(1) if granularity == "tensor" else out.reshape(rows) if granularity == "row" else out


def quantize(x: np.ndarray, granularity: str, fmt, pow2: bool = False):
    """float32 [R, C] -> (codes uint8 [R, C], scale_inv): the rules at the head of te_plugin/numerics.py."""
    pow2 = pow2 or granularity == "mx"
    scale, inverse = numerics.scale_from_amax(amax_of(x, granularity), fmt, pow2)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = fmt.encode((x * expand(scale, granularity, *x.shape)).astype(np.float32))
    return codes, numerics.E8M0.encode(inverse) if granularity == "mx" else inverse


def scale_shape(granularity: str, rows: int, cols: int) -> tuple[int, ...]:
    ceil = lambda a, b: -(-a // b)
    return {
        "tensor": (1,),
        "row": (rows,),
        "block_1x128": (rows, ceil(cols, 128)),
        "block_128x128": (ceil(rows, 128), ceil(cols, 128)),
        "mx": (rows, ceil(cols, MX_BLOCK)),
    }[granularity]


def dequantize(codes: np.ndarray, scale_inv: np.ndarray, granularity: str, fmt) -> np.ndarray:
    if granularity == "mx":
        scale_inv = numerics.E8M0.decode(scale_inv)
    return fmt.decode(codes).astype(np.float64) * expand(scale_inv, granularity, *codes.shape)


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (norm if norm > 0 else 1.0))


__all__ = ["GRANULARITY_CODE", "amax_of", "dequantize", "expand", "quantize", "relative_error", "scale_shape"]
