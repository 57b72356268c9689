"""Quantisation for JAX: an array, its FP8 copies and their scales.

The compiled kernel is opaque to XLA, which would gather a sharded array around it. So every call is a partitioned op
(sharding.py): each device quantises its own part, and an amax that spans devices is reduced over them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from te_plugin import numerics
from te_plugin.jax.call import dtype_name, launch, shape_of, target_of_backend
from te_plugin.jax.sharding import operands_of_call, partitioned, split_axes
from te_plugin.ops.checks import check_flags
from te_plugin.ops.quantize.problem import QuantizeProblem, check_granularity, scale_shape
from te_plugin.plan import plan


class QuantizedArray:
    """x[R,C] in FP8: value = data * scale_inv. Fields as in te_plugin.torch.QuantizedTensor; a pytree.

    stats: FP32[2] (amax with NaN kept, number of non-finite values) of the whole array, however it is sharded.
    """

    def __init__(self, data, scale_inv, granularity: str, dtype: str, stats, data_t=None, scale_inv_t=None):
        self.data, self.scale_inv, self.stats = data, scale_inv, stats
        self.granularity, self.dtype = granularity, dtype
        self.data_t, self.scale_inv_t = data_t, scale_inv_t

    @property
    def amax(self):
        return self.stats[0]

    def dequantize(self, dtype=jnp.float32):
        """The values [R,C]."""
        return dequantize(self.data, self.scale_inv, self.granularity, dtype)

    def dequantize_transpose(self, dtype=jnp.float32):
        """The values of the transposed copy [C,R]."""
        if self.data_t is None:
            raise ValueError("this array was quantised without transpose=True")
        return dequantize(self.data_t, self.scale_inv_t, self.granularity, dtype)


jax.tree_util.register_pytree_node(
    QuantizedArray,
    lambda x: ((x.data, x.scale_inv, x.stats, x.data_t, x.scale_inv_t), (x.granularity, x.dtype)),
    lambda names, leaves: QuantizedArray(leaves[0], leaves[1], *names, *leaves[2:]),
)


def expand_scale(scale_inv, shape: tuple[int, int], granularity: str):
    """scale_inv broadcast to [R,C] in FP32."""
    rows, columns = shape
    if granularity == "tensor":
        return scale_inv.reshape(1, 1)
    if granularity == "row":
        return scale_inv[:, None]
    if granularity == "mx":
        exponent = scale_inv.astype(jnp.int32) - 127
        scale = jnp.where(scale_inv == numerics.E8M0.NAN, jnp.nan, jnp.ldexp(jnp.float32(1), exponent))
        return jnp.repeat(scale, numerics.MX_BLOCK, axis=1)[:, :columns]
    wide = jnp.repeat(scale_inv, numerics.BLOCK, axis=1)[:, :columns]
    return wide if granularity == "block_1x128" else jnp.repeat(wide, numerics.BLOCK, axis=0)[:rows]


def dequantize(data, scale_inv, granularity: str, dtype=jnp.float32):
    """data[R,C] * scale_inv in FP32, rounded once to `dtype`. ValueError for an unknown granularity or an integer dtype."""
    check_granularity(granularity)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dequantize writes floating point numbers, not {jnp.dtype(dtype).name}")
    return (data.astype(jnp.float32) * expand_scale(scale_inv, data.shape, granularity)).astype(dtype)


@dataclass(frozen=True)
class _Cast:
    """The static arguments of one quantisation."""

    format: str
    granularity: str
    pow2: bool
    transpose: bool
    given: bool
    kernel: str
    fallback: str


def quantize(
    x,
    dtype: str = "e4m3",
    granularity: str = "tensor",
    *,
    scale=None,
    pow2_scale: bool = False,
    transpose: bool = False,
    kernel: str = "auto",
    fallback: str = "error",
) -> QuantizedArray:
    """Quantise x[R,C] to FP8 by the rules of numerics.py with the compiled kernel, wherever its parts lie.

    scale: FP32[1] to use in place of the array's own (granularity tensor only; delayed scaling). Not differentiable: the
    result is a constant of x.
    """
    if x.ndim != 2:
        raise ValueError(f"quantize takes x[R,C], got shape {x.shape}")
    check_flags(pow2_scale=pow2_scale, transpose=transpose)
    if scale is not None and pow2_scale:
        raise ValueError("pow2_scale=True: scale is given, so none is computed; leave one of them out")
    options = _Cast(dtype, granularity, pow2_scale, transpose, scale is not None, kernel, fallback)
    _plan_of(x, options)  # refused here, where the caller is in the traceback
    operands = [jax.lax.stop_gradient(x)]
    if scale is not None:
        if jnp.size(scale) != 1:
            raise ValueError(f"scale has {jnp.size(scale)} numbers; one is given for the whole array")
        operands.append(jax.lax.stop_gradient(jnp.asarray(scale, jnp.float32).reshape(1)))
    operands = operands_of_call(*operands)
    # Shardy takes no factor of size 1: a dimension of one block cannot be cut anyway.
    whole = [extent % block == 0 and extent > block for extent, block in zip(x.shape, _blocks(options), strict=True)]
    data, scale_inv, stats, *transposed = _op(options, *whole)(*operands)
    return QuantizedArray(data, scale_inv, granularity, dtype, stats, *transposed)


def _plan_of(x, o: _Cast):
    rows, columns = x.shape
    problem = QuantizeProblem(rows, columns, dtype_name(x), o.format, o.granularity, o.pow2, o.transpose, o.given)
    return plan(problem, target_of_backend(), o.kernel, o.fallback)


def _here(o: _Cast, x, scale=None) -> tuple:
    """Quantise an array that this device holds whole: (data, scale_inv, stats[, data_t, scale_inv_t])."""
    rows, columns = x.shape
    chosen = _plan_of(x, o)
    scale_dtype = "uint8" if o.granularity == "mx" else "fp32"
    data, stats = shape_of((rows, columns), o.format), shape_of((2,), "fp32")
    scale_inv = shape_of(scale_shape(rows, columns, o.granularity), scale_dtype)
    data_t = shape_of((columns, rows), o.format)
    scale_inv_t = shape_of(scale_shape(columns, rows, o.granularity), scale_dtype)
    if o.given and o.transpose:
        d, dt, s, st = launch(
            chosen, "given_transpose", [data, data_t, scale_inv, stats], [x, scale], chosen.attributes
        )
        return d, s, st, dt, s
    if o.given:
        d, s, st = launch(chosen, "given", [data, scale_inv, stats], [x, scale], chosen.attributes)
        return d, s, st
    if o.transpose:
        d, s, dt, t, st = launch(
            chosen, "transpose", [data, scale_inv, data_t, scale_inv_t, stats], [x], chosen.attributes
        )
        return d, s, st, dt, t
    d, s, st = launch(chosen, "plain", [data, scale_inv, stats], [x], chosen.attributes)
    return d, s, st


# How far a scale reaches along (rows, columns): None is the whole dimension, a number is a block of that many.
_REACH = {
    "tensor": (None, None),
    "row": (1, None),
    "block_1x128": (1, numerics.BLOCK),
    "block_128x128": (numerics.BLOCK, numerics.BLOCK),
    "mx": (1, numerics.MX_BLOCK),
}


@functools.cache
def _op(o: _Cast, whole_rows: bool, whole_columns: bool):
    """The partitioned op of one set of static arguments: x[R,C](, scale[1]) -> (data, scale_inv, stats[, data_t, scale_inv_t]).

    whole_rows, whole_columns: the dimension is a whole number of scale blocks, so a split of it splits its scales too.
    """

    def specs(shape, spec, mesh):
        """The sharding this op can work with, closest to `spec`: blocks are never cut."""
        kept = []
        for extent, axes, blocks in zip(shape, spec, _blocks(o), strict=True):
            kept.append(axes if extent % (split_axes(axes, mesh) * blocks) == 0 else None)
        r, c = kept
        outputs = [(r, c), _scale_dims(o, r, c), (None,), (c, r), _scale_dims(o, c, r)]
        return [(r, c), (None,)][: 1 + o.given], outputs[: 5 if o.transpose else 3]

    def lower(axes):
        rows, columns = axes[0]
        return functools.partial(_on_shard, o, rows, columns)

    blocks = _blocks(o)
    r = ("(r i)", "r") if whole_rows and blocks[0] > 1 else ("r", "p")
    c = ("(c j)", "c") if whole_columns and blocks[1] > 1 else ("c", "q")

    def scales(along, across):
        dims = _scale_dims(o, along, across)
        along_name = along[1] if o.granularity == "block_128x128" else along[0]
        names = ("s",) if dims == (None,) else (along_name, across[1])[: len(dims)]
        return " ".join(names)

    rule = f"{r[0]} {c[0]}{', g' if o.given else ''} -> {r[0]} {c[0]}, {scales(r, c)}, t"
    if o.transpose:
        rule += f", {c[0]} {r[0]}, {scales(c, r)}"
    sizes = {name: block for name, block in (("i", blocks[0]), ("j", blocks[1])) if f" {name})" in rule}
    return partitioned(functools.partial(_here, o), specs, lower, rule, sizes)


def _scale_dims(o: _Cast, rows, columns) -> tuple:
    """What belongs to the dimensions of scale_inv, given what belongs to rows and columns of the copy it scales."""
    return {"tensor": (None,), "row": (rows,)}.get(o.granularity, (rows, columns))


def _blocks(o: _Cast) -> tuple[int, int]:
    """The multiples of (rows, columns) that a device must hold."""
    reach = _REACH[o.granularity]
    back = reach[::-1] if o.transpose else (1, 1)
    return tuple(max(a or 1, b or 1) for a, b in zip(reach, back, strict=True))


def _on_shard(o: _Cast, rows: tuple, columns: tuple, x, scale=None) -> tuple:
    """Quantise the part of an array that this device holds; rows and columns are split over those mesh axes."""
    everywhere = (*rows, *columns)
    if not everywhere:
        return _here(o, x, scale)
    if o.granularity == "tensor" and not o.given:
        amax = jax.lax.pmax(jnp.max(jnp.abs(x.astype(jnp.float32))), everywhere)
        scale = scale_from_amax(amax, numerics.FORMATS[o.format], o.pow2).reshape(1)
        given = _Cast(o.format, o.granularity, False, o.transpose, True, o.kernel, o.fallback)
        data, scale_inv, stats, *transposed = _here(given, x, scale)
    elif o.granularity == "row" and (columns or (rows and o.transpose)):
        data, scale_inv, stats, *transposed = _rows_over_devices(o, rows, columns, x)
    else:
        data, scale_inv, stats, *transposed = _here(o, x, scale)
    stats = jnp.stack([jax.lax.pmax(stats[0], everywhere), jax.lax.psum(stats[1], everywhere)])
    return data, scale_inv, stats, *transposed


def _rows_over_devices(o: _Cast, rows: tuple, columns: tuple, x) -> tuple:
    """Row scales where a row (or a column of the transposed copy) spans devices. No kernel takes a list of scales: XLA casts."""
    fmt = numerics.FORMATS[o.format]
    magnitude = jnp.abs(x.astype(jnp.float32))
    nonfinite = jnp.sum(~jnp.isfinite(magnitude)).astype(jnp.float32)
    stats = jnp.stack([jnp.max(magnitude), nonfinite])

    def copy(values, axes, axis):
        amax = jnp.max(magnitude, axis=axis)
        scale = scale_from_amax(jax.lax.pmax(amax, axes) if axes else amax, fmt, o.pow2)
        return cast(values, scale[:, None], fmt), 1.0 / scale

    data, scale_inv = copy(x, columns, 1)
    if not o.transpose:
        return data, scale_inv, stats
    return data, scale_inv, stats, *copy(x.T, rows, 0)


def scale_from_amax(amax, fmt: numerics.Fp8Format, pow2: bool = False):
    """FP32 scale (not its inverse) of an amax array; the JAX twin of numerics.scale_from_amax, bit for bit."""
    amax = amax.astype(jnp.float32)
    finite = jnp.where(jnp.isinf(amax), numerics.FLT_MAX, amax)
    if pow2:
        mantissa, exponent = jnp.frexp(finite / jnp.float32(fmt.max))
        exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
        low, high = numerics.E8M0.MIN_EXPONENT + 1, numerics.E8M0.MAX_EXPONENT - 1
        scale = jnp.ldexp(jnp.float32(1), -jnp.clip(exponent, low, high))
    else:
        scale = jnp.minimum(jnp.float32(fmt.max) / finite, numerics.FLT_MAX)
    return jnp.where(amax == 0, 1.0, jnp.where(jnp.isnan(amax), jnp.nan, scale))


def cast(x, scale, fmt: numerics.Fp8Format):
    """x * scale in FP32, saturated and rounded to `fmt` by XLA: elementwise, so it shards like x. NaN stays NaN."""
    scaled = jnp.clip(x.astype(jnp.float32) * scale, -fmt.max, fmt.max)
    return scaled.astype(getattr(jnp, fmt.jax_dtype))
