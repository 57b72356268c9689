"""The products of a grouped linear for torch: the plan names the kernel, plain or FP8 operands go in.

Legend: M rows (capacity), E experts, K in features, N out features. Rows past the last group give 0 and are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.plan import Plan, plan, remember_unmeasured
from te_plugin.torch import launches
from te_plugin.torch.call import DTYPE_NAME, define, dtype_name, launch, target_of
from te_plugin.torch.options import Options
from te_plugin.torch.quantize import dequantize


@dataclass(frozen=True)
class GroupedGemmOptions(Options):
    """The non-tensor arguments of one grouped product; stage as in ops/grouped_gemm/problem.py."""

    precision: str = "bf16"
    stage: str = "forward"
    kernel: str = "auto"
    fallback: str = "error"


@remember_unmeasured
def _plan(m, n, k, groups, dtype, device, key) -> Plan:
    o = GroupedGemmOptions.from_key(key)
    return plan(GroupedGemmProblem(m, n, k, groups, dtype, o.precision, o.stage), target_of(device), o.kernel, o.fallback)


def _bounds(group_sizes: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    ends = group_sizes.cumsum(0).tolist()
    if any(size < 0 for size in group_sizes.tolist()) or (ends and ends[-1] > rows):
        raise ValueError(f"group_sizes {group_sizes.tolist()} must not be negative and sum to at most {rows} rows")
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _run_rows(chosen: Plan, x, weight, group_sizes):
    """y[M,N] = rows of group e times weight[e][N,K]^T, plain operands of one dtype."""
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        y = x.new_zeros(x.shape[0], weight.shape[1])
        for e, (a, b) in enumerate(_bounds(group_sizes, x.shape[0])):
            y[a:b] = x[a:b] @ weight[e].t()
        return y
    y = torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    launch(chosen, "forward", x, weight, group_sizes, y)
    return y


def _run_wgrad(chosen: Plan, dy, x, group_sizes, dw, accumulate: bool) -> None:
    """dw[E,N,K] (FP32) = or += the sum of dy^T x over the rows of each group, plain operands of one dtype."""
    if chosen.kernel.library is None:
        launches.record(chosen, "wgrad")
        for e, (a, b) in enumerate(_bounds(group_sizes, x.shape[0])):
            product = dy[a:b].float().t() @ x[a:b].float()
            dw[e] = dw[e] + product if accumulate else product
        return
    launch(chosen, "wgrad", dy, x, group_sizes, dw, int(accumulate))


# ---- plain operands ----


def _rows(x, weight, group_sizes, options: str):
    chosen = _plan(x.shape[0], weight.shape[1], weight.shape[2], weight.shape[0], dtype_name(x), x.device, options)
    return _run_rows(chosen, x, weight, group_sizes)


def _dgrad(dy, weight, group_sizes, options: str):
    """dx[M,K] = dy[M,N] times weight[e][N,K]."""
    chosen = _plan(dy.shape[0], weight.shape[2], weight.shape[1], weight.shape[0], dtype_name(dy), dy.device, options)
    if "dgrad" not in chosen.kernel.entry_points:
        return _run_rows(chosen, dy, weight.transpose(1, 2).contiguous(), group_sizes)
    dx = torch.empty((dy.shape[0], weight.shape[2]), dtype=dy.dtype, device=dy.device)
    launch(chosen, "dgrad", dy, weight, group_sizes, dx)
    return dx


def _wgrad_into(dy, x, group_sizes, dw, options: str, accumulate: bool) -> None:
    chosen = _plan(x.shape[0], dy.shape[1], x.shape[1], dw.shape[0], dtype_name(x), x.device, options)
    _run_wgrad(chosen, dy, x, group_sizes, dw, accumulate)


def _wgrad(dy, x, group_sizes, groups: int, options: str):
    dw = torch.empty((groups, dy.shape[1], x.shape[1]), dtype=torch.float32, device=x.device)
    _wgrad_into(dy, x, group_sizes, dw, options, False)
    return dw


define("grouped_gemm(Tensor x, Tensor weight, Tensor group_sizes, str options) -> Tensor", _rows,
       lambda x, weight, group_sizes, options: x.new_empty((x.shape[0], weight.shape[1])))
define("grouped_gemm_dgrad(Tensor dy, Tensor weight, Tensor group_sizes, str options) -> Tensor", _dgrad,
       lambda dy, weight, group_sizes, options: dy.new_empty((dy.shape[0], weight.shape[2])))
define("grouped_gemm_wgrad(Tensor dy, Tensor x, Tensor group_sizes, SymInt groups, str options) -> Tensor", _wgrad,
       lambda dy, x, group_sizes, groups, options: x.new_empty((groups, dy.shape[1], x.shape[1]), dtype=torch.float32))
define("grouped_gemm_wgrad_accumulate(Tensor dy, Tensor x, Tensor group_sizes, Tensor(a!) dw, str options) -> ()",
       lambda dy, x, group_sizes, dw, options: _wgrad_into(dy, x, group_sizes, dw, options, True),
       lambda dy, x, group_sizes, dw, options: None)


# ---- FP8 operands ----


def _scaled_rows(a, scale_a, b, scale_b, group_sizes, options: str, out_dtype: torch.dtype):
    """a[M,K] FP8 (scale_inv as quantize gives it), b[E,N,K] FP8 (scale_inv of every expert, stacked) -> y[M,N]."""
    chosen = _plan(a.shape[0], b.shape[1], a.shape[1], b.shape[0], DTYPE_NAME[out_dtype], a.device, options)
    if "scaled" in chosen.kernel.entry_points:
        y = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
        launch(chosen, "scaled", a, b, scale_a, scale_b, group_sizes, y, *chosen.attributes)
        return y
    (format_a, grain_a), (format_b, grain_b) = chosen.problem.operands()
    per_expert = scale_b[:, None] if grain_b == "tensor" else scale_b
    weight = torch.stack([dequantize(w, s, grain_b, format_b) for w, s in zip(b, per_expert, strict=True)])
    return _run_rows(chosen, dequantize(a, scale_a, grain_a, format_a), weight, group_sizes).to(out_dtype)


def _scaled_wgrad_into(dy_t, scale_dy, x_t, scale_x, group_sizes, dw, options: str, accumulate: bool) -> None:
    """dy_t[N,M], x_t[K,M] FP8, scaled along their rows (the tokens), into dw[E,N,K]."""
    chosen = _plan(dy_t.shape[1], dy_t.shape[0], x_t.shape[0], dw.shape[0], DTYPE_NAME[dw.dtype], dy_t.device, options)
    if "scaled_wgrad" in chosen.kernel.entry_points:
        launch(chosen, "scaled_wgrad", dy_t, x_t, scale_dy, scale_x, group_sizes, dw, *chosen.attributes, int(accumulate))
        return
    (format_dy, grain_dy), (format_x, grain_x) = chosen.problem.operands()
    dy = dequantize(dy_t, scale_dy, grain_dy, format_dy).t().contiguous()
    x = dequantize(x_t, scale_x, grain_x, format_x).t().contiguous()
    if dw.dtype == torch.float32:
        _run_wgrad(chosen, dy, x, group_sizes, dw, accumulate)
    else:
        full = torch.empty(dw.shape, dtype=torch.float32, device=dw.device)
        _run_wgrad(chosen, dy, x, group_sizes, full, False)
        dw.copy_(full)


def _scaled_wgrad(dy_t, scale_dy, x_t, scale_x, group_sizes, groups: int, options: str, out_dtype: torch.dtype):
    dw = torch.empty((groups, dy_t.shape[0], x_t.shape[0]), dtype=out_dtype, device=dy_t.device)
    _scaled_wgrad_into(dy_t, scale_dy, x_t, scale_x, group_sizes, dw, options, False)
    return dw


_PAIR = "Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor group_sizes"
define(f"scaled_grouped_gemm({_PAIR}, str options, ScalarType out_dtype) -> Tensor", _scaled_rows,
       lambda a, scale_a, b, scale_b, group_sizes, options, out_dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype))
define(f"scaled_grouped_wgrad({_PAIR}, SymInt groups, str options, ScalarType out_dtype) -> Tensor", _scaled_wgrad,
       lambda a, scale_a, b, scale_b, group_sizes, groups, options, out_dtype:
       a.new_empty((groups, a.shape[0], b.shape[0]), dtype=out_dtype))
define(f"scaled_grouped_wgrad_accumulate({_PAIR}, Tensor(a!) dw, str options) -> ()",
       lambda a, scale_a, b, scale_b, group_sizes, dw, options:
       _scaled_wgrad_into(a, scale_a, b, scale_b, group_sizes, dw, options, True),
       lambda a, scale_a, b, scale_b, group_sizes, dw, options: None)
