"""RMSNorm, SwiGLU, rotary embedding and cross-entropy for JAX on the compiled kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from te_plugin.jax.call import dtype_name, launch, shape_of, target_of_backend
from te_plugin.jax.checks import check_integers
from te_plugin.jax.sharding import operands_of_call
from te_plugin.ops.activation.problem import ActivationProblem
from te_plugin.ops.loss.problem import LossProblem
from te_plugin.ops.norm.problem import NormProblem
from te_plugin.ops.rope.problem import RopeProblem
from te_plugin.plan import Plan, PlanError, plan

IGNORED_LABEL = -100


@dataclass(frozen=True)
class PointwiseOptions:
    """The non-array arguments of these ops."""

    eps: float = 1e-5
    inverse: bool = False
    kernel: str = "auto"


def _plan(problem, o: PointwiseOptions) -> Plan:
    chosen = plan(problem, target_of_backend(), o.kernel)
    if chosen.kernel.library is None:
        raise PlanError(
            f"{problem.op}: kernel {chosen.kernel.name!r} has no JAX form; XLA fuses plain jax.numpy at least as well"
        )
    return chosen


def _like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x, weight, options):
    return _norm_forward(x, weight, options)[0]


def _norm_forward(x, weight, o):
    chosen = _plan(NormProblem(*x.shape, dtype=dtype_name(x), eps=o.eps), o)
    y, rstd = launch(chosen, "forward", [_like(x), shape_of(x.shape[:1], "fp32")], [x, weight], (o.eps,))
    return y, (x, weight, rstd)


def _norm_backward(o, saved, dy):
    x, weight, rstd = saved
    chosen = _plan(NormProblem(*x.shape, dtype=dtype_name(x), eps=o.eps), o)
    dx, dw = launch(chosen, "backward", [_like(x), shape_of(weight.shape, "fp32")], [dy, x, weight, rstd])
    return dx, dw.astype(weight.dtype)


_rms_norm.defvjp(_norm_forward, _norm_backward)


def rms_norm(x, weight, eps: float = 1e-5, *, kernel: str = "auto"):
    """y[...,C] = x * rsqrt(mean(x^2) + eps) * weight[C], statistics in FP32."""
    if x.shape[-1:] != weight.shape or x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)}, weight is {weight.dtype}{list(weight.shape)}; expected one dtype and "
            f"weight[{x.shape[-1]}]"
        )
    flat, weight = operands_of_call(x.reshape(-1, x.shape[-1]), weight)
    return _rms_norm(flat, weight, PointwiseOptions(eps=float(eps), kernel=kernel)).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _swiglu(x, options):
    return _swiglu_forward(x, options)[0]


def _swiglu_forward(x, o):
    rows, columns = x.shape[0], x.shape[1] // 2
    chosen = _plan(ActivationProblem(rows, columns, dtype_name(x)), o)
    return launch(chosen, "forward", [jax.ShapeDtypeStruct((rows, columns), x.dtype)], [x])[0], x


def _swiglu_backward(o, x, dy):
    chosen = _plan(ActivationProblem(x.shape[0], x.shape[1] // 2, dtype_name(x)), o)
    return (launch(chosen, "backward", [_like(x)], [dy, x])[0],)


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def swiglu(x, *, kernel: str = "auto"):
    """x[...,2C] = [gate | up] -> silu(gate) * up [...,C]."""
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu halves the last dimension into gate and up; {x.shape[-1]} is odd")
    (flat,) = operands_of_call(x.reshape(-1, x.shape[-1]))
    y = _swiglu(flat, PointwiseOptions(kernel=kernel))
    return y.reshape(*x.shape[:-1], x.shape[-1] // 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rope(x, positions, inv_freq, options):
    return _rope_call(x, positions, inv_freq, options)


def _rope_call(x, positions, inv_freq, o):
    chosen = _plan(RopeProblem(*x.shape, dtype=dtype_name(x)), o)
    return launch(chosen, "forward", [_like(x)], [x, positions, inv_freq], (int(o.inverse),))[0]


def _rope_backward(o, saved, dy):
    positions, inv_freq = saved
    return _rope_call(dy, positions, inv_freq, PointwiseOptions(inverse=True, kernel=o.kernel)), None, None


_rope.defvjp(
    lambda x, positions, inv_freq, o: (_rope_call(x, positions, inv_freq, o), (positions, inv_freq)), _rope_backward
)


def rope(x, positions, *, inv_freq, kernel: str = "auto"):
    """Rotate x[T,H,D] by positions[T] * inv_freq[D/2] (FP32); pairs are (i, i + D/2)."""
    if x.ndim != 3 or x.shape[2] % 2 or positions.shape != x.shape[:1] or inv_freq.shape != (x.shape[2] // 2,):
        raise ValueError(
            f"rope takes x[T,H,D] with an even D, positions[T], inv_freq[D/2]; got {x.shape}, {positions.shape}, "
            f"{inv_freq.shape}"
        )
    check_integers("rope: positions", positions)
    operands = operands_of_call(x, positions.astype(jnp.int32), inv_freq.astype(jnp.float32))
    return _rope(*operands, PointwiseOptions(kernel=kernel))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits, labels, options):
    return _loss_forward(logits, labels, options)[0]


def _loss_forward(logits, labels, o):
    chosen = _plan(LossProblem(*logits.shape, dtype=dtype_name(logits)), o)
    row = shape_of(logits.shape[:1], "fp32")
    loss, lse = launch(chosen, "forward", [row, row], [logits, labels])
    return loss, (logits, labels, lse)


def _loss_backward(o, saved, dloss):
    logits, labels, lse = saved
    chosen = _plan(LossProblem(*logits.shape, dtype=dtype_name(logits)), o)
    return launch(chosen, "backward", [_like(logits)], [dloss, logits, labels, lse])[0], None


_cross_entropy.defvjp(_loss_forward, _loss_backward)


def cross_entropy(logits, labels, *, kernel: str = "auto"):
    """Per-token loss in nats, FP32[...]: logits[...,V], labels[...] integers, -100 gives loss and gradient 0."""
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {logits.shape} and labels {labels.shape} differ in their leading dimensions")
    check_integers("cross_entropy: labels", labels)
    flat = operands_of_call(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).astype(jnp.int32))
    return _cross_entropy(*flat, PointwiseOptions(kernel=kernel)).reshape(labels.shape)
