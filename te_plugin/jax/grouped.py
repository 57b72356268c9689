"""Grouped linear for JAX: rows sorted by expert, one weight an expert, group sizes on the device.

Legend: M rows (capacity), E experts, K in features, N out features. Rows past the last group give 0 and are never read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from te_plugin import numerics
from te_plugin.jax.call import dtype_name, launch, shape_of, target_of_backend
from te_plugin.jax.linear import LAYOUTS
from te_plugin.jax.quantize import quantize
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.ops.linear_checks import check_features
from te_plugin.plan import Plan, PlanError, plan

PRECISIONS = ("fp32", "bf16", "fp8_current")


@dataclass(frozen=True)
class GroupedOptions:
    """The non-array arguments of a grouped linear call. layout: of the weight, "nk" [E,N,K] or "kn" [E,K,N]."""

    precision: str = "bf16"
    layout: str = "nk"
    pow2_scale: bool = False
    kernel: str = "auto"
    fallback: str = "error"


def _plan(m, n, k, groups, dtype, o: GroupedOptions) -> Plan:
    chosen = plan(GroupedGemmProblem(m, n, k, groups, dtype, o.precision), target_of_backend(), o.kernel, o.fallback)
    if chosen.kernel.library is None:
        raise PlanError(
            f"grouped_gemm: kernel {chosen.kernel.name!r} reads group sizes on the host, which a traced "
            "computation cannot"
        )
    return chosen


def _gemm(x, weight, group_sizes, o: GroupedOptions):
    """y[M,N]: rows x[M,K] of group e times weight[e,N,K]^T."""
    chosen = _plan(x.shape[0], weight.shape[1], weight.shape[2], weight.shape[0], dtype_name(x), o)
    return launch(
        chosen, "forward", [jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), x.dtype)], [x, weight, group_sizes]
    )[0]


def _wgrad(left, right, group_sizes, o: GroupedOptions):
    """dw[E,A,B] in FP32: left[M,A]^T right[M,B] over the rows of each group."""
    groups = group_sizes.shape[0]
    chosen = _plan(left.shape[0], left.shape[1], right.shape[1], groups, dtype_name(left), o)
    shape = (groups, left.shape[1], right.shape[1])
    return launch(chosen, "wgrad", [shape_of(shape, "fp32")], [left, right, group_sizes], (0,))[0]


def _rounded(x, operand: str, o: GroupedOptions):
    """x[R,C] rounded through FP8, in FP32. The product of rounded values in FP32 is the product of the FP8 values."""
    kind = numerics.scaling(o.precision)
    if kind is None:
        return x
    fmt = kind.gradient_format if operand == "gradient" else kind.forward_format
    return quantize(x, fmt.name, getattr(kind, operand), pow2_scale=o.pow2_scale, fallback=o.fallback).dequantize(
        jnp.float32
    )


def _rounded_weight(weight, o: GroupedOptions):
    """Every expert has scales of its own."""
    if numerics.scaling(o.precision) is None:
        return weight
    return jax.lax.map(lambda w: _rounded(w, "weight", o), weight)


def _inside(x, group_sizes):
    """x with the rows past the last group cleared, so that they enter no amax."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None], x, 0)


def _operand(x, operand: str, group_sizes, o: GroupedOptions):
    return x if numerics.scaling(o.precision) is None else _rounded(_inside(x, group_sizes), operand, o)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x, weight, group_sizes, o: GroupedOptions):
    return _forward(x, weight, group_sizes, o)[0]


def _forward(x, weight, group_sizes, o: GroupedOptions):
    xq, wq = _operand(x, "activation", group_sizes, o), _rounded_weight(weight, o)
    by_k = wq if o.layout == "nk" else jnp.swapaxes(wq, 1, 2)
    return _gemm(xq, by_k, group_sizes, o).astype(x.dtype), (x, weight, group_sizes)


def _backward(o: GroupedOptions, saved, dy):
    x, weight, group_sizes = saved
    xq, wq, dyq = (
        _operand(x, "activation", group_sizes, o),
        _rounded_weight(weight, o),
        _operand(dy, "gradient", group_sizes, o),
    )
    by_n = jnp.swapaxes(wq, 1, 2) if o.layout == "nk" else wq
    dx = _gemm(dyq, by_n, group_sizes, o).astype(x.dtype)
    dw = _wgrad(dyq, xq, group_sizes, o) if o.layout == "nk" else _wgrad(xq, dyq, group_sizes, o)
    return dx, dw.astype(weight.dtype), None


_grouped.defvjp(_forward, _backward)


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
    (the arrays' own dtype) or fp8_current (one scale for the rows, one for each expert's weight). layout: "kn" for a
    weight[E,K,N].
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"grouped_linear in JAX computes in {', '.join(PRECISIONS)}, not in {precision}")
    k_axis = 2 if layout == "nk" else 1
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[k_axis] or group_sizes.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_linear takes x[M,K], weight[E,{','.join(layout.upper())}], group_sizes[E]; got {x.shape}, "
            f"{weight.shape}, {group_sizes.shape}"
        )
    check_features(weight.shape[k_axis], weight.shape[3 - k_axis], precision)
    if dtype_name(x) == "fp32" and precision == "bf16":
        precision = "fp32"
    return _grouped(
        x, weight, group_sizes.astype(jnp.int32), GroupedOptions(precision, layout, pow2_scale, kernel, fallback)
    )
