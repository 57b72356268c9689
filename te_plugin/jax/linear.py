"""y = x W^T for JAX in every precision, forward and backward; the twin of te_plugin.torch.linear.

Legend: M rows, K in features, N out features. A weight is [N,K] as in torch, or [K,N] ("kn") as flax and MaxText keep it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from te_plugin import numerics
from te_plugin.jax.call import first_derivative_only, target_of_backend
from te_plugin.jax.checks import check_arrays
from te_plugin.jax.gemm import Operand, along_columns, along_rows, matmul, needs_transpose
from te_plugin.jax.quantize import quantize
from te_plugin.jax.sharding import operands_of_call, varying_axes
from te_plugin.ops.checks import check_flags
from te_plugin.ops.linear_checks import check_features, check_pow2

LAYOUTS = ("nk", "kn")
OPERANDS = ("activation", "weight", "gradient")


@dataclass(frozen=True)
class LinearOptions:
    """The non-array arguments of a linear call. kernel: of its products."""

    precision: str = "bf16"
    layout: str = "nk"
    pow2_scale: bool = False
    kernel: str = "auto"
    fallback: str = "error"


# ---- plain ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _plain_linear(x, weight, o: LinearOptions):
    return matmul(Operand(x, 1), Operand(weight, _k_axis(o)), x.dtype, o.kernel, o.fallback)


def _k_axis(o: LinearOptions) -> int:
    """The dimension of the weight that holds K."""
    return 1 if o.layout == "nk" else 0


def _plain_forward(x, weight, o: LinearOptions):
    return _plain_linear(x, weight, o), (x, weight)


def _plain_backward(o: LinearOptions, saved, dy):
    x, weight = saved
    dx = matmul(Operand(dy, 1), Operand(weight, 1 - _k_axis(o)), x.dtype, o.kernel, o.fallback)
    pair = (Operand(dy, 0), Operand(x, 0)) if o.layout == "nk" else (Operand(x, 0), Operand(dy, 0))
    return dx, matmul(*pair, weight.dtype, o.kernel, o.fallback)


_plain_linear.defvjp(_plain_forward, _plain_backward)


# ---- FP8 ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fp8_linear(x, weight, scales, stats, o: LinearOptions):
    return _forward(x, weight, scales, stats, o)[0]


def _quantize(x, operand: str, scales, o: LinearOptions):
    kind = numerics.scaling(o.precision)
    granularity = getattr(kind, operand)
    scale = scales[OPERANDS.index(operand)].reshape(1) if kind.delayed else None
    return quantize(
        first_derivative_only(x),
        kind.format(operand).name,
        granularity,
        scale=scale,
        pow2_scale=o.pow2_scale,
        transpose=needs_transpose(granularity),
        fallback=o.fallback,
    )


def _forward(x, weight, scales, stats, o: LinearOptions):
    xq, wq = _quantize(x, "activation", scales, o), _quantize(weight, "weight", scales, o)
    along_k, along_n = (along_rows, along_columns) if o.layout == "nk" else (along_columns, along_rows)
    y = matmul(along_rows(xq), along_k(wq), x.dtype, o.kernel, o.fallback)
    like = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    # An operand is not a pytree: its arrays are saved, and its static half is made again in backward.
    right, left = along_n(wq), along_columns(xq)
    saved = (left.data, left.scale_inv, right.data, right.scale_inv, xq.stats, wq.stats, scales, stats, like)
    return y, saved


def _backward(o: LinearOptions, saved, dy):
    x_data, x_scale, w_data, w_scale, x_stats, w_stats, scales, stats, (like_x, like_w) = saved
    kind = numerics.scaling(o.precision)
    fmt = kind.forward_format.name
    dyq = _quantize(dy, "gradient", scales, o)
    x = Operand(x_data, 1 if needs_transpose(kind.activation) else 0, x_scale, kind.activation, fmt)
    w_axis = 1 if o.layout == "kn" or needs_transpose(kind.weight) else 0
    dx = matmul(along_rows(dyq), Operand(w_data, w_axis, w_scale, kind.weight, fmt), like_x.dtype, o.kernel, o.fallback)
    # Kernels take the format of gradients, where it is one of its own (E5M2), as their first operand only.
    turned = o.layout == "kn" and kind.gradient_format is not kind.forward_format
    pair = (along_columns(dyq), x) if o.layout == "nk" or turned else (x, along_columns(dyq))
    dw = matmul(*pair, like_w.dtype, o.kernel, o.fallback)
    dw = dw.T if turned else dw
    # These two cotangents are no derivatives: they carry numbers of this step out, for the caller to overwrite its state.
    found = jnp.stack([x_stats, w_stats, dyq.stats])
    return dx, dw, _shared(found, scales)[:, 0] if kind.delayed else None, None if stats is None else _shared(found, stats)


def _shared(found, like):
    """stats [3,2] of a call over the devices that share `like`: the largest amax, all non-finite values."""
    axes = tuple(sorted(varying_axes(found) - varying_axes(like)))
    return jnp.stack([jax.lax.pmax(found[:, 0], axes), jax.lax.psum(found[:, 1], axes)], 1) if axes else found


_fp8_linear.defvjp(_forward, _backward)


def linear(
    x,
    weight,
    bias=None,
    precision: str = "bf16",
    *,
    layout: str = "nk",
    scales=None,
    stats=None,
    pow2_scale: bool = False,
    kernel: str = "auto",
    fallback: str = "error",
):
    """y[...,N] = x[...,K] weight[N,K]^T + bias[N].

    precision: fp32, bf16 (the arrays' own dtype), or an FP8 scaling. layout: "nk", or "kn" for a weight[K,N].
    scales: FP32[3] (activation, weight, gradient) for fp8_delayed. Its cotangent is not a derivative but the three amaxes of
    this call. stats: FP32[3,2] of anything, FP8 only; its cotangent is (amax, non-finite values) of the three operands.
    Sharded arrays stay sharded: amaxes are those of the whole arrays, and nothing is gathered around the quantisation.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    takes = f"linear takes x[...,K], weight[{','.join(layout.upper())}]"
    check_arrays(takes, x=x, weight=weight)
    if not x.ndim or weight.ndim != 2:
        raise ValueError(f"{takes}; got {x.shape} and {weight.shape}")
    n, k = weight.shape if layout == "nk" else weight.shape[::-1]
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} features, weight[{','.join(layout.upper())}] has K={k}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {bias.shape}, weight[{','.join(layout.upper())}] has N={n}")
    kind = numerics.scaling(precision)
    check_features(k, n, precision)
    check_flags(pow2_scale=pow2_scale)
    check_pow2(precision, pow2_scale)
    x, weight = operands_of_call(x, weight)
    flat = x.reshape(-1, k)
    options = LinearOptions(precision, layout, pow2_scale, kernel, fallback)
    if kind is None:
        if scales is not None or stats is not None:
            raise ValueError(f"scales and stats belong to FP8; precision is {precision}")
        y = _plain_linear(flat, weight, options)
    else:
        if kind.delayed and scales is None:
            raise ValueError(f"precision {precision} keeps amax histories: pass scales, FP32[3]")
        if not kind.delayed and scales is not None:
            raise ValueError(f"precision {precision} takes its scales from the arrays; scales belong to fp8_delayed")
        rows = flat.shape[0]
        padding = -rows % kind.row_multiple if target_of_backend().is_gpu else 0
        if padding:
            # wgrad contracts over the rows, and tensor cores take them in multiples; zeros change no amax and no sum.
            flat = jnp.pad(flat, ((0, padding), (0, 0)))
        y = _fp8_linear(flat, weight, scales, stats, options)[:rows]
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.reshape(*x.shape[:-1], n)
