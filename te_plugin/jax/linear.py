"""y = x W^T for JAX in every precision, forward and backward; the twin of te_plugin.torch.linear."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from te_plugin import numerics
from te_plugin.jax.quantize import dequantize, quantize
from te_plugin.ops.linear_checks import check_features


@dataclass(frozen=True)
class LinearOptions:
    """The non-array arguments of a linear call."""

    precision: str = "bf16"
    pow2_scale: bool = False
    kernel: str = "auto"
    fallback: str = "error"


def _dot_nt(a, b):
    """a[M,K] b[N,K]^T with FP32 accumulation, in FP32."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _scaled_dot(a, scale_a, granularity_a, b, scale_b, granularity_b):
    return _dot_nt(dequantize(a, scale_a, granularity_a), dequantize(b, scale_b, granularity_b))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _fp8_linear(x, weight, scales, options: LinearOptions):
    return _forward(x, weight, scales, options)[0]


def _quantize(x, operand: str, scales, o: LinearOptions):
    kind = numerics.scaling(o.precision)
    fmt = kind.gradient_format if operand == "gradient" else kind.forward_format
    scale = scales[("activation", "weight", "gradient").index(operand)].reshape(1) if kind.delayed else None
    return quantize(x, fmt.name, getattr(kind, operand), scale=scale, pow2_scale=o.pow2_scale and not kind.delayed,
                    transpose=True, kernel=o.kernel, fallback=o.fallback)


def _forward(x, weight, scales, o: LinearOptions):
    xq, wq = _quantize(x, "activation", scales, o), _quantize(weight, "weight", scales, o)
    y = _scaled_dot(xq.data, xq.scale_inv, xq.granularity, wq.data, wq.scale_inv, wq.granularity).astype(x.dtype)
    like = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    saved = (xq.data_t, xq.scale_inv_t, xq.amax, wq.data_t, wq.scale_inv_t, wq.amax, scales, like)
    return y, saved


def _backward(o: LinearOptions, saved, dy):
    x_t, x_scale, x_amax, w_t, w_scale, w_amax, scales, (like_x, like_w) = saved
    kind = numerics.scaling(o.precision)
    dyq = _quantize(dy, "gradient", scales, o)
    dx = _scaled_dot(dyq.data, dyq.scale_inv, kind.gradient, w_t, w_scale, kind.weight)
    dw = _scaled_dot(dyq.data_t, dyq.scale_inv_t, kind.gradient, x_t, x_scale, kind.activation)
    # The gradient of the scales carries this step's amaxes out: the caller's state is overwritten with them.
    amax = jnp.stack([x_amax, w_amax, dyq.amax]) if kind.delayed else None
    return dx.astype(like_x.dtype), dw.astype(like_w.dtype), amax


_fp8_linear.defvjp(_forward, _backward)


def linear(x, weight, bias=None, precision: str = "bf16", *, scales=None, pow2_scale: bool = False, kernel: str = "auto",
           fallback: str = "error"):
    """y[...,N] = x[...,K] weight[N,K]^T + bias[N].

    precision: fp32, bf16 (the arrays' own dtype), or an FP8 scaling. scales: FP32[3] (activation, weight, gradient) for
    fp8_delayed; the cotangent of `scales` is not a derivative but the three amaxes of this call.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} features, weight[N,K] has K={weight.shape[-1]}")
    kind = numerics.scaling(precision)
    check_features(weight.shape[1], weight.shape[0], precision)
    flat = x.reshape(-1, x.shape[-1])
    if kind is None:
        y = _dot_nt(flat, weight).astype(x.dtype)
    else:
        if kind.delayed and scales is None:
            raise ValueError(f"precision {precision} keeps amax histories: pass scales, FP32[3]")
        y = _fp8_linear(flat, weight, scales if kind.delayed else None, LinearOptions(precision, pow2_scale, kernel, fallback))
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], weight.shape[0])
