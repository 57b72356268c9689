"""Grouped linear for JAX: rows sorted by expert, one weight an expert, group sizes on the device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from te_plugin.jax.call import dtype_name, launch, shape_of, target_of_backend
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.plan import Plan, PlanError, plan


def _plan(m, n, k, groups, dtype, kernel) -> Plan:
    chosen = plan(GroupedGemmProblem(m, n, k, groups, dtype, "fp32" if dtype == "fp32" else "bf16"), target_of_backend(), kernel)
    if chosen.kernel.library is None:
        raise PlanError("grouped_gemm: the composite kernel reads group sizes on the host, which a traced computation cannot")
    return chosen


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x, weight, group_sizes, kernel: str):
    return _gemm(x, weight, group_sizes, kernel)


def _gemm(x, weight, group_sizes, kernel):
    chosen = _plan(x.shape[0], weight.shape[1], weight.shape[2], weight.shape[0], dtype_name(x), kernel)
    return launch(chosen, "forward", [jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), x.dtype)], [x, weight, group_sizes])[0]


def _forward(x, weight, group_sizes, kernel):
    return _gemm(x, weight, group_sizes, kernel), (x, weight, group_sizes)


def _backward(kernel, saved, dy):
    x, weight, group_sizes = saved
    dx = _gemm(dy, jnp.swapaxes(weight, 1, 2), group_sizes, kernel)
    chosen = _plan(x.shape[0], weight.shape[1], weight.shape[2], weight.shape[0], dtype_name(x), kernel)
    dw = launch(chosen, "wgrad", [shape_of(weight.shape, "fp32")], [dy, x, group_sizes], (0,))[0]
    return dx, dw.astype(weight.dtype), None


_grouped.defvjp(_forward, _backward)


def grouped_linear(x, weight, group_sizes, *, kernel: str = "auto"):
    """y[M,N]: row m of group e times weight[e,N,K]^T in the arrays' dtype; rows are sorted by group, surplus rows give 0.

    group_sizes: int32[E], summing to at most M (checked when the computation runs).
    """
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2] or group_sizes.shape != weight.shape[:1]:
        raise ValueError(f"grouped_linear takes x[M,K], weight[E,N,K], group_sizes[E]; got {x.shape}, {weight.shape}, "
                         f"{group_sizes.shape}")
    return _grouped(x, weight, group_sizes.astype(jnp.int32), kernel)
