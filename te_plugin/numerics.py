"""FP8 formats and scaling: the one page that defines every number.

Every kernel, in every language, follows the rules of this file:

- Round to nearest even. Out of range saturates to +-max, infinities included. NaN stays NaN.
- Scale arithmetic is FP32. `scale_inv` is the dequantisation multiplier: value = data * scale_inv.
- scale = min(max / amax, FLT_MAX) with one FP32 division; data = cast(x * scale) with one FP32 multiplication;
  scale_inv = 1 / scale with one FP32 division. amax == 0 gives data 0 and scale 1.
- A NaN in a tensor, row or block makes its scale NaN, and with it every value of that tensor, row or block.
  An infinity makes amax infinite; such an amax is treated as the largest finite FP32 value.
- pow2_scale rounds scale_inv up to a power of two: scale_inv = 2^ceil(log2(amax / max)).

The NumPy functions here are the reference of the casts; oracle.py builds the reference of the ops on them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

FLT_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit floating-point format: sign, exponent, mantissa bits and its special codes.

    code: the number that kernels are given. max: largest finite magnitude. fnuz: one NaN (0x80), no negative zero.
    """

    name: str
    code: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_infinity: bool
    fnuz: bool
    torch_dtype: str
    jax_dtype: str

    @property
    def smallest(self) -> float:
        """Smallest positive (subnormal) magnitude."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """uint8 codes -> float32 values."""
        return _decode_table(self)[np.asarray(codes, dtype=np.uint8)]

    def encode(self, values: np.ndarray) -> np.ndarray:
        """float32 or float64 values -> uint8 codes: nearest even, saturating, NaN kept."""
        values = np.asarray(values)
        magnitudes, midpoints = _encode_tables(self)
        absolute = np.abs(values)
        # side="left" leaves a value that sits on a midpoint at the lower code; the even rule then decides.
        index = np.searchsorted(midpoints, np.where(np.isnan(absolute), 0.0, absolute), side="left")
        on_midpoint = (index < len(midpoints)) & (midpoints[np.minimum(index, len(midpoints) - 1)] == absolute)
        index = index + (on_midpoint & (index % 2 == 1))
        codes = index.astype(np.uint8)
        negative = np.signbit(values)
        if self.fnuz:
            negative = negative & (index > 0)
        codes = np.where(negative, codes | np.uint8(0x80), codes)
        return np.where(np.isnan(values), np.uint8(self.nan_code), codes)

    @property
    def nan_code(self) -> int:
        return 0x80 if self.fnuz else 0x7F


E4M3 = Fp8Format("e4m3", 0, 4, 3, 7, 448.0, False, False, "float8_e4m3fn", "float8_e4m3fn")
E5M2 = Fp8Format("e5m2", 1, 5, 2, 15, 57344.0, True, False, "float8_e5m2", "float8_e5m2")
E4M3_FNUZ = Fp8Format("e4m3_fnuz", 2, 4, 3, 8, 240.0, False, True, "float8_e4m3fnuz", "float8_e4m3fnuz")
E5M2_FNUZ = Fp8Format("e5m2_fnuz", 3, 5, 2, 16, 57344.0, False, True, "float8_e5m2fnuz", "float8_e5m2fnuz")
FORMATS = {f.name: f for f in (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)}


class E8M0:
    """The scale of an MX block: an exponent byte, 2^(byte - 127); 255 is NaN."""

    NAN = 255
    MAX_EXPONENT = 127
    MIN_EXPONENT = -127

    @staticmethod
    def decode(codes: np.ndarray) -> np.ndarray:
        codes = np.asarray(codes, dtype=np.uint8)
        values = np.ldexp(np.float32(1), np.minimum(codes, E8M0.NAN - 1).astype(np.int32) - 127)
        return np.where(codes == E8M0.NAN, np.float32(np.nan), values)

    @staticmethod
    def encode(scale_inv: np.ndarray) -> np.ndarray:
        """Powers of two -> exponent bytes; anything that is no power of two is rounded up."""
        scale_inv = np.asarray(scale_inv, dtype=np.float32)
        exponent = ceil_log2(scale_inv)
        codes = np.clip(exponent, E8M0.MIN_EXPONENT, E8M0.MAX_EXPONENT) + 127
        return np.where(np.isnan(scale_inv), E8M0.NAN, codes).astype(np.uint8)


@functools.cache
def _decode_table(fmt: Fp8Format) -> np.ndarray:
    table = np.empty(256, dtype=np.float32)
    top = (1 << fmt.exponent_bits) - 1
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> fmt.mantissa_bits) & top
        mantissa = code & ((1 << fmt.mantissa_bits) - 1)
        if fmt.fnuz and code == 0x80:
            table[code] = np.nan
        elif not fmt.fnuz and fmt.has_infinity and exponent == top:
            table[code] = sign * math.inf if mantissa == 0 else np.nan
        elif not fmt.fnuz and not fmt.has_infinity and (code & 0x7F) == 0x7F:
            table[code] = np.nan
        elif exponent == 0:
            table[code] = sign * math.ldexp(mantissa, 1 - fmt.bias - fmt.mantissa_bits)
        else:
            table[code] = sign * math.ldexp((1 << fmt.mantissa_bits) + mantissa, exponent - fmt.bias - fmt.mantissa_bits)
    return table


@functools.cache
def _encode_tables(fmt: Fp8Format) -> tuple[np.ndarray, np.ndarray]:
    """Finite non-negative magnitudes by code, and the midpoints between neighbours (float64, exact)."""
    positive = _decode_table(fmt)[:128].astype(np.float64)
    magnitudes = positive[np.isfinite(positive)]
    return magnitudes, (magnitudes[:-1] + magnitudes[1:]) / 2


def ceil_log2(x: np.ndarray) -> np.ndarray:
    """Smallest integer e with 2^e >= x, exactly, for positive finite float32 x (0 and NaN give 0)."""
    x = np.asarray(x, dtype=np.float32)
    mantissa, exponent = np.frexp(np.where(np.isfinite(x) & (x > 0), x, np.float32(1)))
    return np.where(mantissa == 0.5, exponent - 1, exponent).astype(np.int32)


def scale_from_amax(amax, fmt: Fp8Format, pow2: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(scale, scale_inv) in FP32 for an amax (any shape). See the head of this file for the rules."""
    amax = np.asarray(amax, dtype=np.float32)
    limit = np.float32(fmt.max)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        finite_amax = np.where(np.isinf(amax), np.float32(FLT_MAX), amax)
        if pow2:
            exponent = np.clip(ceil_log2(finite_amax / limit), E8M0.MIN_EXPONENT + 1, E8M0.MAX_EXPONENT - 1)
            scale_inv = np.ldexp(np.float32(1), exponent)
            scale = np.ldexp(np.float32(1), -exponent)
        else:
            scale = np.minimum(limit / finite_amax, np.float32(FLT_MAX))
            scale_inv = np.float32(1) / scale
        zero = amax == 0
        scale = np.where(zero, np.float32(1), scale)
        scale_inv = np.where(zero, np.float32(1), scale_inv)
        # np.where picks a branch by comparison, and every comparison with NaN is false: restore it by hand.
        scale = np.where(np.isnan(amax), np.float32(np.nan), scale)
        scale_inv = np.where(np.isnan(amax), np.float32(np.nan), scale_inv)
    return scale.astype(np.float32), scale_inv.astype(np.float32)


GRANULARITIES = ("tensor", "row", "block_1x128", "block_128x128", "mx")
GRANULARITY_CODE = {name: code for code, name in enumerate(GRANULARITIES)}
BLOCK = 128
MX_BLOCK = 32


@dataclass(frozen=True)
class Scaling:
    """How a precision scales the three operands of a linear layer.

    forward_format serves activations and weights, gradient_format output gradients. The granularities are those of the
    row-major copy; a transposed copy has the same granularity along its own rows.
    """

    name: str
    forward_format: Fp8Format = E4M3
    gradient_format: Fp8Format = E4M3
    activation: str = "tensor"
    weight: str = "tensor"
    gradient: str = "tensor"
    delayed: bool = False
    feature_multiple: int = 16
    row_multiple: int = 16

    def format(self, operand: str) -> Fp8Format:
        """Of an operand: "activation", "weight" or "gradient"."""
        return self.gradient_format if operand == "gradient" else self.forward_format


SCALINGS = {
    "fp8_current": Scaling("fp8_current", gradient_format=E5M2),
    "fp8_delayed": Scaling("fp8_delayed", gradient_format=E5M2, delayed=True),
    "fp8_rowwise": Scaling("fp8_rowwise", activation="row", weight="row", gradient="row"),
    "fp8_block": Scaling("fp8_block", activation="block_1x128", weight="block_128x128", gradient="block_1x128",
                         feature_multiple=128, row_multiple=16),
    "mxfp8": Scaling("mxfp8", activation="mx", weight="mx", gradient="mx", feature_multiple=32, row_multiple=32),
}
PRECISIONS = ("fp32", "bf16", *SCALINGS)


def scaling(precision: str) -> Scaling | None:
    """The scaling of a precision; None for fp32 and bf16. ValueError for an unknown name."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown; known: {', '.join(PRECISIONS)}")
    return SCALINGS.get(precision)


def fp8_max(arch: str, name: str = "e4m3") -> float:
    """Largest finite value of the FP8 format that an architecture's hardware uses (gfx942: FNUZ, others: OCP)."""
    return hardware_format(arch, name).max


def hardware_format(arch: str, name: str = "e4m3") -> Fp8Format:
    return FORMATS[name + "_fnuz"] if arch == "gfx942" else FORMATS[name]


def token_multiple(precision: str, tp: int = 1, cp: int = 1, sp: bool = False) -> int:
    """The multiple that a row's token count should have so that nothing is padded inside.

    Sequence parallelism splits rows over tp ranks; load-balanced context parallelism cuts each segment into 2*cp chunks.
    """
    if tp < 1 or cp < 1:
        raise ValueError(f"tp={tp}, cp={cp}: at least one rank")
    kind = scaling(precision)
    rows = kind.row_multiple if kind else 1
    return rows * (tp if sp else 1) * (2 * cp if cp > 1 else 1)
