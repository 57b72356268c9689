"""Grouped linear for JAX: rows sorted by expert, one weight an expert, group sizes on the device.

The twin of te_plugin.torch.grouped: x, W and dy are quantised once, the groups enter the products alone.
Legend: M rows (capacity), E experts, K in features, N out features. Rows past the last group give 0 and enter no scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from te_plugin import numerics
from te_plugin.jax.call import dtype_name, first_derivative_only, launch, shape_of, target_of_backend
from te_plugin.jax.checks import check_arrays, check_integers
from te_plugin.jax.linear import LAYOUTS
from te_plugin.jax.quantize import QuantizedArray, dequantize, quantize
from te_plugin.jax.sharding import operands_of_call
from te_plugin.ops.checks import check_flags
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.ops.linear_checks import check_features, check_pow2
from te_plugin.plan import Plan, PlanError, plan

PRECISIONS = ("fp32", "bf16", *(name for name, kind in numerics.SCALINGS.items() if not kind.delayed))


@dataclass(frozen=True)
class GroupedOptions:
    """The non-array arguments of a grouped linear call. layout: of the weight, "nk" [E,N,K] or "kn" [E,K,N]."""

    precision: str = "bf16"
    layout: str = "nk"
    pow2_scale: bool = False
    kernel: str = "auto"
    fallback: str = "error"


def _plan(m, n, k, groups, dtype, stage: str, o: GroupedOptions) -> Plan:
    problem = GroupedGemmProblem(m, n, k, groups, dtype, o.precision, stage)
    chosen = plan(problem, target_of_backend(), o.kernel, o.fallback)
    if chosen.kernel.library is None:
        raise PlanError(
            f"grouped_gemm: kernel {chosen.kernel.name!r} reads group sizes on the host, which a traced "
            "computation cannot"
        )
    return chosen


# ---- products ----


def _run_rows(chosen: Plan, x, weight, group_sizes):
    """y[M,N]: rows x[M,K] of group e times weight[e,N,K]^T, plain operands of one dtype."""
    y = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), x.dtype)
    return launch(chosen, "forward", [y], [x, weight, group_sizes])[0]


def _run_wgrad(chosen: Plan, dy, x, group_sizes):
    """dw[E,N,K] in FP32: dy[M,N]^T x[M,K] over the rows of each group."""
    dw = shape_of((group_sizes.shape[0], dy.shape[1], x.shape[1]), "fp32")
    return launch(chosen, "wgrad", [dw], [dy, x, group_sizes], (0,))[0]


def _plain_rows(x, weight, axis: int, group_sizes, stage: str, o: GroupedOptions):
    """y[M,N]: rows x[M,K] of group e times weight[e], summed over dimension `axis` of weight[E,N,K] (2) or weight[E,K,N] (1)."""
    weight = weight.astype(x.dtype)
    m, k, n, groups = *x.shape, weight.shape[3 - axis], weight.shape[0]
    chosen = _plan(m, n, k, groups, dtype_name(x), stage, o)
    if axis == 2:
        return _run_rows(chosen, x, weight, group_sizes)
    if "dgrad" not in chosen.kernel.entry_points:
        return _run_rows(chosen, x, jnp.swapaxes(weight, 1, 2), group_sizes)
    return launch(chosen, "dgrad", [jax.ShapeDtypeStruct((m, n), x.dtype)], [x, weight, group_sizes])[0]


def _scaled_rows(a, scale_a, b, scale_b, group_sizes, out_dtype, stage: str, o: GroupedOptions):
    """a[M,K] FP8, b[E,N,K] FP8 with the scales of every expert -> y[M,N]."""
    m, (groups, n, k) = a.shape[0], b.shape
    chosen = _plan(m, n, k, groups, dtype_name(jax.ShapeDtypeStruct((), out_dtype)), stage, o)
    if "scaled" in chosen.kernel.entry_points:
        y = jax.ShapeDtypeStruct((m, n), out_dtype)
        return launch(chosen, "scaled", [y], [a, b, scale_a, scale_b, group_sizes], chosen.attributes)[0]
    (_, grain_a), (_, grain_b) = chosen.problem.operands()
    scale_b = scale_b[:, None] if grain_b == "tensor" else scale_b
    weight = jax.vmap(lambda w, s: dequantize(w, s, grain_b))(b, scale_b)
    return _run_rows(chosen, dequantize(a, scale_a, grain_a), weight, group_sizes).astype(out_dtype)


def _scaled_wgrad(dy_t, scale_dy, x_t, scale_x, group_sizes, out_dtype, o: GroupedOptions):
    """dy_t[N,M], x_t[K,M] FP8, scaled along their rows (the tokens) -> dw[E,N,K]."""
    (n, m), k, groups = dy_t.shape, x_t.shape[0], group_sizes.shape[0]
    chosen = _plan(m, n, k, groups, dtype_name(jax.ShapeDtypeStruct((), out_dtype)), "wgrad", o)
    if "scaled_wgrad" in chosen.kernel.entry_points:
        dw = jax.ShapeDtypeStruct((groups, n, k), out_dtype)
        inputs = [dy_t, x_t, scale_dy, scale_x, group_sizes]
        return launch(chosen, "scaled_wgrad", [dw], inputs, (*chosen.attributes, 0))[0]
    (_, grain_dy), (_, grain_x) = chosen.problem.operands()
    dy, x = dequantize(dy_t, scale_dy, grain_dy).T, dequantize(x_t, scale_x, grain_x).T
    return _run_wgrad(chosen, dy, x, group_sizes).astype(out_dtype)


# ---- quantisation ----


def _quantize(x, operand: str, o: GroupedOptions, transpose: bool = True) -> QuantizedArray:
    kind = numerics.scaling(o.precision)
    fmt = kind.format(operand)
    return quantize(
        first_derivative_only(x),
        fmt.name,
        getattr(kind, operand),
        pow2_scale=o.pow2_scale,
        transpose=transpose,
        fallback=o.fallback,
    )


def _quantize_experts(weight, o: GroupedOptions) -> tuple:
    """weight[E,R,C] with scales of its own for every expert -> data[E,R,C], its scales, data_t[E,C,R], its scales."""

    def one(w):
        made = _quantize(w, "weight", o)
        return made.data, made.scale_inv, made.data_t, made.scale_inv_t

    data, scale, data_t, scale_t = jax.lax.map(one, weight)
    if numerics.scaling(o.precision).weight == "tensor":
        scale, scale_t = scale.reshape(-1), scale_t.reshape(-1)
    return data, scale, data_t, scale_t


def _only_groups(x, group_sizes):
    """x with the rows past the last group cleared, so that they enter no amax."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None], x, 0)


# ---- plain ----


def _k_axis(layout: str) -> int:
    """The dimension of a weight that holds K."""
    return 2 if layout == "nk" else 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _plain(x, weight, group_sizes, o: GroupedOptions):
    return _plain_forward(x, weight, group_sizes, o)[0]


def _plain_forward(x, weight, group_sizes, o: GroupedOptions):
    return _plain_rows(x, weight, _k_axis(o.layout), group_sizes, "forward", o), (x, weight, group_sizes)


def _plain_backward(o: GroupedOptions, saved, dy):
    x, weight, group_sizes = saved
    dx = _plain_rows(dy, weight, 3 - _k_axis(o.layout), group_sizes, "dgrad", o)
    left, right = (dy, x) if o.layout == "nk" else (x, dy)
    chosen = _plan(x.shape[0], left.shape[1], right.shape[1], weight.shape[0], dtype_name(x), "wgrad", o)
    return dx, _run_wgrad(chosen, left, right, group_sizes).astype(weight.dtype), None


_plain.defvjp(_plain_forward, _plain_backward)


# ---- FP8 ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _fp8(x, weight, group_sizes, o: GroupedOptions):
    return _fp8_forward(x, weight, group_sizes, o)[0]


def _fp8_forward(x, weight, group_sizes, o: GroupedOptions):
    xq = _quantize(_only_groups(x, group_sizes), "activation", o)
    data, scale, data_t, scale_t = _quantize_experts(weight, o)
    by_k, by_n = ((data, scale), (data_t, scale_t)) if o.layout == "nk" else ((data_t, scale_t), (data, scale))
    y = _scaled_rows(xq.data, xq.scale_inv, *by_k, group_sizes, x.dtype, "forward", o)
    return y, (xq.data_t, xq.scale_inv_t, *by_n, group_sizes, jnp.zeros((0,), weight.dtype))


def _fp8_backward(o: GroupedOptions, saved, dy):
    x_t, x_scale_t, w, w_scale, group_sizes, like_weight = saved
    dyq = _quantize(_only_groups(dy, group_sizes), "gradient", o)
    dx = _scaled_rows(dyq.data, dyq.scale_inv, w, w_scale, group_sizes, dy.dtype, "dgrad", o)
    dw = _scaled_wgrad(dyq.data_t, dyq.scale_inv_t, x_t, x_scale_t, group_sizes, like_weight.dtype, o)
    # The kernel takes the gradient's format (E5M2) as its first operand only, so a [K,N] weight's gradient is turned.
    return dx, dw if o.layout == "nk" else jnp.swapaxes(dw, 1, 2), None


_fp8.defvjp(_fp8_forward, _fp8_backward)


def grouped_linear(
    x,
    weight,
    group_sizes,
    precision: str = "bf16",
    *,
    layout: str = "nk",
    pow2_scale: bool = False,
    kernel: str = "auto",
    fallback: str = "error",
):
    """y[M,N]: row m of group e times weight[e,N,K]^T; rows are sorted by group, surplus rows give 0.

    group_sizes: integers [E] on the device, summing to at most M (checked when the computation runs). precision: fp32 or bf16
    (the arrays' own dtype) or an FP8 scaling without history: weights per expert, x and dy over the rows of all groups
    together. layout: "kn" for a weight[E,K,N].
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"grouped_linear in JAX computes in {', '.join(PRECISIONS)}, not in {precision}")
    k_axis = _k_axis(layout)
    check_arrays(f"grouped_linear takes x[M,K], weight[E,{','.join(layout.upper())}]", x=x, weight=weight)
    if not isinstance(group_sizes, jax.Array | np.ndarray):
        raise ValueError(f"group_sizes must be an array of integers, got {type(group_sizes).__name__}")
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[k_axis] or group_sizes.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_linear takes x[M,K], weight[E,{','.join(layout.upper())}], group_sizes[E]; got {x.shape}, "
            f"{weight.shape}, {group_sizes.shape}"
        )
    check_integers("grouped_linear: group_sizes", group_sizes)
    check_features(weight.shape[k_axis], weight.shape[3 - k_axis], precision)
    check_flags(pow2_scale=pow2_scale)
    check_pow2(precision, pow2_scale)
    if dtype_name(x) == "fp32" and precision == "bf16":
        precision = "fp32"
    x, weight, group_sizes = operands_of_call(x, weight, group_sizes)
    options, sizes = GroupedOptions(precision, layout, pow2_scale, kernel, fallback), group_sizes.astype(jnp.int32)
    kind = numerics.scaling(precision)
    if kind is None:
        return _plain(x, weight, sizes, options)
    rows = x.shape[0]
    padding = -rows % kind.row_multiple if target_of_backend().is_gpu else 0
    if padding:
        # wgrad contracts over the rows, and tensor cores take them in multiples; these are surplus rows like any others.
        x = jnp.pad(x, ((0, padding), (0, 0)))
    return _fp8(x, weight, sizes, options)[:rows]
