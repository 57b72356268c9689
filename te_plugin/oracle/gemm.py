"""Linear and grouped linear in float64 on the operands that a kernel multiplies.

y = x W^T, dx = dy W, dW = dy^T x. FP8 tensor cores take both operands with the contracted dimension innermost, so each
product has its own pair of quantised copies, scaled along the dimension it contracts:

    forward  x[M,K] and W[N,K]        dgrad  dy[M,N] and W^T[K,N]        wgrad  dy^T[N,M] and x^T[K,M]

Shapes: M rows, N out features, K in features, E experts. precision: a name of numerics.PRECISIONS; fp32 and bf16
multiply the values as given. A grouped linear is the loop over its experts. Each expert's weight has scales of its own. x and dy
are quantised once, as if they belonged to a dense linear: one scale a tensor (fp8_current) covers the rows of all groups, and
the scales of wgrad, which run along the tokens, do not begin anew with each group. Rows past the last group count as 0.
"""

from __future__ import annotations

import numpy as np

from te_plugin import numerics
from te_plugin.oracle.scaling import dequantize, quantize, quantize_with_scale


def linear(
    x, weight, bias=None, precision: str = "bf16", *, pow2: bool = False, scales: dict[str, float] | None = None
) -> np.ndarray:
    """x[M,K], weight[N,K], bias[N] -> y[M,N]. scales: {"activation", "weight", "gradient"} of delayed scaling."""
    y = operand(x, "activation", precision, pow2, scales) @ operand(weight, "weight", precision, pow2, scales).T
    return y if bias is None else y + np.asarray(bias, dtype=np.float64)


def linear_dgrad(dy, weight, precision: str = "bf16", *, pow2: bool = False, scales=None) -> np.ndarray:
    """dy[M,N], weight[N,K] -> dx[M,K]."""
    return operand(dy, "gradient", precision, pow2, scales) @ operand(np.asarray(weight).T, "weight", precision, pow2, scales).T


def linear_wgrad(dy, x, precision: str = "bf16", *, pow2: bool = False, scales=None) -> np.ndarray:
    """dy[M,N], x[M,K] -> dW[N,K]."""
    return (
        operand(np.asarray(dy).T, "gradient", precision, pow2, scales)
        @ operand(np.asarray(x).T, "activation", precision, pow2, scales).T
    )


def operand(x, role: str, precision: str, pow2: bool = False, scales: dict[str, float] | None = None) -> np.ndarray:
    """The float64 value of x[R,C] as the operand `role` (activation, weight, gradient) whose rows are contracted."""
    kind = numerics.scaling(precision)
    if kind is None:
        return np.asarray(x).astype(np.float64)
    fmt = kind.format(role)
    if kind.delayed:
        if scales is None:
            raise ValueError(f"{precision} takes its scales from the state: pass scales={{'{role}': ...}}")
        return dequantize(quantize_with_scale(x, scales[role], fmt))
    return dequantize(quantize(x, fmt, getattr(kind, role), pow2))


def grouped_gemm(a, b, group_sizes) -> np.ndarray:
    """a[M,K], b[E,N,K] -> y[M,N]: rows of group e times b[e]^T; rows past the last group are 0 and never read."""
    y = np.zeros((len(a), b.shape[1]))
    for e, rows in enumerate(_groups(group_sizes, len(a))):
        y[rows] = np.asarray(a[rows]).astype(np.float64) @ np.asarray(b[e]).astype(np.float64).T
    return y


def grouped_gemm_wgrad(dy, x, group_sizes) -> np.ndarray:
    """dy[M,N], x[M,K] -> dW[E,N,K]; an empty group's gradient is exactly 0."""
    groups = _groups(group_sizes, len(x))
    dw = np.zeros((len(groups), dy.shape[1], x.shape[1]))
    for e, rows in enumerate(groups):
        dw[e] = np.asarray(dy[rows]).astype(np.float64).T @ np.asarray(x[rows]).astype(np.float64)
    return dw


def grouped_linear(x, weight, group_sizes, precision: str = "bf16", *, pow2: bool = False) -> np.ndarray:
    """x[M,K], weight[E,N,K] -> y[M,N], expert by expert; rows past the last group are 0 and never read."""
    groups = _groups(group_sizes, len(x))
    y = np.zeros((len(x), weight.shape[1]))
    values = _by_group(x, groups, "activation", precision, pow2)
    for e, rows in enumerate(groups):
        y[rows] = values[e] @ operand(weight[e], "weight", precision, pow2).T
    return y


def grouped_linear_backward(
    dy, x, weight, group_sizes, precision: str = "bf16", *, pow2: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """dy[M,N] -> dx[M,K], dW[E,N,K], expert by expert; surplus rows have dx 0, empty experts dW 0."""
    groups = _groups(group_sizes, len(x))
    dx, dw = np.zeros(x.shape), np.zeros(weight.shape)
    by_row = _by_group(dy, groups, "gradient", precision, pow2)
    left = _columns(dy, groups, "gradient", precision, pow2)
    right = _columns(x, groups, "activation", precision, pow2)
    for e, rows in enumerate(groups):
        dx[rows] = by_row[e] @ operand(np.asarray(weight[e]).T, "weight", precision, pow2).T
        dw[e] = left[:, rows] @ right[:, rows].T
    return dx, dw


def _by_group(x, groups: list[slice], role: str, precision: str, pow2: bool) -> list[np.ndarray]:
    """The operand of each group, contracted over its columns. One scale a tensor covers the rows of all groups."""
    kind = numerics.scaling(precision)
    if kind is not None and getattr(kind, role) == "tensor":
        used = operand(np.asarray(x[: groups[-1].stop if groups else 0]), role, precision, pow2)
        return [used[rows] for rows in groups]
    return [operand(np.asarray(x[rows]), role, precision, pow2) for rows in groups]


def _columns(x, groups: list[slice], role: str, precision: str, pow2: bool) -> np.ndarray:
    """x[M,C] as the operand [C,M] whose rows (a feature's values over the tokens) are contracted, group by group.

    It is scaled as one matrix: blocks along the tokens begin at row 0 whatever the groups are. Surplus rows count as 0.
    """
    inside = np.arange(len(x)) < (groups[-1].stop if groups else 0)
    return operand(np.where(inside[:, None], x, 0).T, role, precision, pow2)


def align_groups(group_sizes, multiple: int) -> np.ndarray:
    """Each group's rows rounded up to a multiple; an empty group stays empty."""
    sizes = np.asarray(group_sizes)
    return -(-sizes // multiple) * multiple


def _groups(group_sizes, rows: int) -> list[slice]:
    sizes = np.asarray(group_sizes)
    if (sizes < 0).any() or sizes.sum() > rows:
        raise ValueError(f"group sizes {sizes.tolist()} must be >= 0 and add up to at most the {rows} rows given")
    ends = np.cumsum(sizes)
    return [slice(int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True)]
