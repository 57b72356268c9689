"""Quantisation for JAX: an array, its FP8 copies and their scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from te_plugin import numerics
from te_plugin.jax.call import dtype_name, launch, shape_of, target_of_backend
from te_plugin.ops.quantize.problem import QuantizeProblem, scale_shape
from te_plugin.plan import plan


class QuantizedArray:
    """x[R,C] in FP8: value = data * scale_inv. Fields as in te_plugin.torch.QuantizedTensor; a pytree."""

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
    lambda names, leaves: QuantizedArray(leaves[0], leaves[1], *names, *leaves[2:]))


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
    """data[R,C] * scale_inv in FP32, rounded once to `dtype`."""
    return (data.astype(jnp.float32) * expand_scale(scale_inv, data.shape, granularity)).astype(dtype)


def quantize(x, dtype: str = "e4m3", granularity: str = "tensor", *, scale=None, pow2_scale: bool = False,
             transpose: bool = False, kernel: str = "auto", fallback: str = "error") -> QuantizedArray:
    """Quantise x[R,C] to FP8 by the rules of numerics.py with the compiled kernel.

    scale: FP32[1] to use in place of the array's own (granularity tensor only; delayed scaling).
    """
    if x.ndim != 2:
        raise ValueError(f"quantize takes x[R,C], got shape {x.shape}")
    rows, columns = x.shape
    problem = QuantizeProblem(rows, columns, dtype_name(x), dtype, granularity, pow2_scale, transpose, scale is not None)
    chosen = plan(problem, target_of_backend(), kernel, fallback)
    scale_dtype = "uint8" if granularity == "mx" else "fp32"
    data, stats = shape_of((rows, columns), dtype), shape_of((2,), "fp32")
    scale_inv = shape_of(scale_shape(rows, columns, granularity), scale_dtype)
    data_t = shape_of((columns, rows), dtype)
    scale_inv_t = shape_of(scale_shape(columns, rows, granularity), scale_dtype)
    x = jax.lax.stop_gradient(x)
    if scale is not None and transpose:
        d, dt, s, st = launch(chosen, "given_transpose", [data, data_t, scale_inv, stats], [x, scale], chosen.attributes)
        return QuantizedArray(d, s, granularity, dtype, st, dt, s)
    if scale is not None:
        d, s, st = launch(chosen, "given", [data, scale_inv, stats], [x, scale], chosen.attributes)
    elif transpose:
        d, s, dt, t, st = launch(chosen, "transpose", [data, scale_inv, data_t, scale_inv_t, stats], [x], chosen.attributes)
        return QuantizedArray(d, s, granularity, dtype, st, dt, t)
    else:
        d, s, st = launch(chosen, "plain", [data, scale_inv, stats], [x], chosen.attributes)
    return QuantizedArray(d, s, granularity, dtype, st)


def scale_from_amax(amax, fmt: numerics.Fp8Format):
    """FP32 scale (not its inverse) of an amax array; the JAX twin of numerics.scale_from_amax."""
    amax = jnp.where(jnp.isinf(amax), numerics.FLT_MAX, amax.astype(jnp.float32))
    scale = jnp.minimum(jnp.float32(fmt.max) / amax, numerics.FLT_MAX)
    return jnp.where(amax == 0, 1.0, jnp.where(jnp.isnan(amax), jnp.nan, scale))


def cast(x, scale, fmt: numerics.Fp8Format):
    """x * scale in FP32, saturated and rounded to `fmt` by XLA: elementwise, so it shards like x. NaN stays NaN."""
    scaled = jnp.clip(x.astype(jnp.float32) * scale, -fmt.max, fmt.max)
    return scaled.astype(getattr(jnp, fmt.jax_dtype))
