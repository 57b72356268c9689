"""Grouped linear for torch: rows sorted by expert, one weight an expert, group sizes on the device.

Legend: M rows (capacity), E experts, K in features, N out features. Rows past the last group never matter: their output and
gradient are 0, and what they hold is never read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from te_plugin import numerics
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.ops.linear_checks import check_features
from te_plugin.plan import Plan, plan
from te_plugin.torch import launches
from te_plugin.torch.call import define, dtype_name, launch, target_of
from te_plugin.torch.options import Options
from te_plugin.torch.quantize import QuantizeOptions, quantize_2d
from te_plugin.torch.state import operand_options


@dataclass(frozen=True)
class GroupedOptions(Options):
    """The non-tensor arguments of a grouped linear call."""

    precision: str = "bf16"
    pow2_scale: bool = False
    accumulate_main_grad: bool = False
    kernel: str = "auto"
    fallback: str = "error"


@functools.lru_cache(maxsize=4096)
def _plan(m, n, k, groups, dtype, device, precision, kernel, fallback) -> Plan:
    return plan(GroupedGemmProblem(m, n, k, groups, dtype, precision), target_of(device), kernel, fallback)


def _plan_for(x, weight, o: GroupedOptions) -> Plan:
    return _plan(x.shape[0], weight.shape[1], weight.shape[2], weight.shape[0], dtype_name(x), x.device, o.precision,
                 o.kernel, o.fallback)


def _bounds(group_sizes: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    ends = group_sizes.cumsum(0).tolist()
    if any(size < 0 for size in group_sizes.tolist()) or (ends and ends[-1] > rows):
        raise ValueError(f"group_sizes {group_sizes.tolist()} must not be negative and sum to at most {rows} rows")
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _gemm(x, weight, group_sizes, options):
    """y[M,N]: rows of group e times weight[e][N,K]^T, FP32 accumulation, output in x's dtype."""
    o = GroupedOptions.from_key(options)
    chosen = _plan_for(x, weight, o)
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        y = x.new_zeros(x.shape[0], weight.shape[1])
        for e, (a, b) in enumerate(_bounds(group_sizes, x.shape[0])):
            y[a:b] = x[a:b] @ weight[e].t()
        return y
    y = torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    launch(chosen, "forward", x, weight, group_sizes, y)
    return y


def _wgrad(dy, x, group_sizes, main_grad, groups: int, options):
    """dw[E,N,K] in FP32 = sum over the rows of each group of dy^T x, or added to main_grad in place."""
    o = GroupedOptions.from_key(options)
    chosen = _plan(x.shape[0], dy.shape[1], x.shape[1], groups, dtype_name(x), x.device, o.precision, o.kernel, o.fallback)
    dw = main_grad
    if dw is None:
        dw = torch.empty((groups, dy.shape[1], x.shape[1]), dtype=torch.float32, device=x.device)
    if chosen.kernel.library is None:
        launches.record(chosen, "wgrad")
        for e, (a, b) in enumerate(_bounds(group_sizes, x.shape[0])):
            product = dy[a:b].float().t() @ x[a:b].float()
            dw[e] = dw[e] + product if main_grad is not None else product
        return dw
    launch(chosen, "wgrad", dy, x, group_sizes, dw, int(main_grad is not None))
    return dw


define("grouped_gemm(Tensor x, Tensor weight, Tensor group_sizes, str options) -> Tensor", _gemm,
       lambda x, weight, group_sizes, options: x.new_empty((x.shape[0], weight.shape[1])))
define("grouped_gemm_wgrad(Tensor dy, Tensor x, Tensor group_sizes, SymInt groups, str options) -> Tensor",
       lambda dy, x, group_sizes, groups, options: _wgrad(dy, x, group_sizes, None, groups, options),
       lambda dy, x, group_sizes, groups, options: x.new_empty((groups, dy.shape[1], x.shape[1]), dtype=torch.float32))


def _rows_in_groups(group_sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """bool[rows,1]: rows that belong to a group; computed on the device."""
    return (torch.arange(rows, device=group_sizes.device) < group_sizes.sum())[:, None]


def _fake_quantize_rows(x, o: GroupedOptions, operand: str, inside):
    """x rounded through FP8 as `precision` scales it; rows outside the groups count as zero."""
    kind = numerics.scaling(o.precision)
    options = operand_options(kind, operand, o.pow2_scale, False)
    return quantize_2d(torch.where(inside, x, 0), options).dequantize(torch.float32)


def _fake_quantize_columns(x, o: GroupedOptions, operand: str, group_sizes, inside):
    """x[M,C] rounded with scales along M, as the operands of wgrad are. Blocks never span two groups."""
    if getattr(numerics.scaling(o.precision), operand) == "tensor":
        return _fake_quantize_rows(x, o, operand, inside)
    return torch.ops.te_plugin.round_group_columns(torch.where(inside, x, 0), group_sizes, operand, o.key())


def _round_group_columns(x, group_sizes, operand: str, options: str):
    """An op of its own, because the loop over groups reads their sizes on the host, which a traced graph cannot."""
    o = GroupedOptions.from_key(options)
    options = operand_options(numerics.scaling(o.precision), operand, o.pow2_scale, True)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for a, b in _bounds(group_sizes, x.shape[0]):
        if b > a:
            y[a:b] = quantize_2d(x[a:b].contiguous(), options).dequantize_transpose(torch.float32).t()
    return y


define("round_group_columns(Tensor x, Tensor group_sizes, str operand, str options) -> Tensor", _round_group_columns,
       lambda x, group_sizes, operand, options: x.new_empty(x.shape, dtype=torch.float32))


def _to(x, dtype: torch.dtype):
    """x.to(dtype), and x itself where nothing changes: a traced no-op makes one tensor count as two outputs of the forward,
    and the gradient of the first is lost."""
    return x if x.dtype == dtype else x.to(dtype)


def _fake_quantize_weight(weight, o: GroupedOptions, transpose: bool):
    """weight[E,N,K] rounded through FP8, each expert with scales of its own; transpose: scaled for dgrad."""
    kind = numerics.scaling(o.precision)
    options: QuantizeOptions = operand_options(kind, "weight", o.pow2_scale, transpose)
    made = [quantize_2d(w, options) for w in weight.detach()]
    if transpose:
        return torch.stack([w.dequantize_transpose(torch.float32) for w in made])
    return torch.stack([w.dequantize(torch.float32) for w in made])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group_sizes, o: GroupedOptions):
        key = o.key()
        ctx.save_for_backward(x, weight, group_sizes)
        ctx.o = o
        if numerics.scaling(o.precision) is None:
            return torch.ops.te_plugin.grouped_gemm(x, weight, group_sizes, key)
        xq = _fake_quantize_rows(x, o, "activation", _rows_in_groups(group_sizes, x.shape[0]))
        return _to(torch.ops.te_plugin.grouped_gemm(xq, _fake_quantize_weight(weight, o, False), group_sizes, key), x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, group_sizes = ctx.saved_tensors
        o, key = ctx.o, ctx.o.key()
        dy = dy.contiguous()
        fp8 = numerics.scaling(o.precision) is not None
        inside = _rows_in_groups(group_sizes, x.shape[0])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            if fp8:
                dyq, wt = _fake_quantize_rows(dy, o, "gradient", inside), _fake_quantize_weight(weight, o, True)
            else:
                dyq, wt = dy, weight.detach().transpose(1, 2).contiguous()
            dx = torch.ops.te_plugin.grouped_gemm(dyq, wt, group_sizes, key).to(x.dtype)
        if ctx.needs_input_grad[1]:
            left, right = dy, x
            if fp8:
                left = _fake_quantize_columns(dy, o, "gradient", group_sizes, inside)
                right = _fake_quantize_columns(x, o, "activation", group_sizes, inside)
            if o.accumulate_main_grad:
                _wgrad(left, right, group_sizes, weight.main_grad, weight.shape[0], key)
                from te_plugin.torch.linear import _main_grad_done

                dw = _main_grad_done(weight)
            else:
                dw = torch.ops.te_plugin.grouped_gemm_wgrad(left, right, group_sizes, weight.shape[0], key).to(weight.dtype)
        return dx, dw, None, None


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_sizes: torch.Tensor,
    precision: str = "bf16",
    *,
    pow2_scale: bool = False,
    accumulate_main_grad: bool = False,
    kernel: str = "auto",
    fallback: str = "error",
) -> torch.Tensor:
    """y[M,N]: row m of group e times weight[e,N,K]^T; rows are sorted by group.

    group_sizes: int32 or int64 [E] on x's device, summing to at most M. Empty groups, one group and surplus rows are legal; dW of
    an empty group is exactly 0. Scales: activations and gradients as `precision` says over the rows of the groups, weights per
    expert.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"grouped_linear takes x[M,K] and weight[E,N,K]; got {tuple(x.shape)} and {tuple(weight.shape)}")
    if group_sizes.shape != (weight.shape[0],):
        raise ValueError(f"group_sizes has shape {tuple(group_sizes.shape)}, weight holds {weight.shape[0]} experts")
    if group_sizes.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"group_sizes must be int32 or int64, got {group_sizes.dtype}")
    if group_sizes.device != x.device:
        raise ValueError(f"group_sizes is on {group_sizes.device}, x on {x.device}")
    if numerics.scaling(precision) is not None and numerics.scaling(precision).delayed:
        precision_error = f"precision {precision} keeps a history per tensor, and the rows of an expert differ from step to step"
        raise ValueError(f"{precision_error}; use fp8_current, fp8_rowwise, fp8_block or mxfp8 for experts")
    check_features(weight.shape[2], weight.shape[1], precision)
    if accumulate_main_grad and getattr(weight, "main_grad", None) is None:
        raise ValueError("accumulate_main_grad=True needs weight.main_grad, an FP32 tensor of the weight's shape")
    options = GroupedOptions(precision, pow2_scale, accumulate_main_grad, kernel, fallback)
    return _GroupedLinear.apply(x.contiguous(), weight, group_sizes, options)


def align_groups(counts: torch.Tensor, multiple: int) -> torch.Tensor:
    """Group sizes rounded up to a multiple; an empty group stays empty."""
    if multiple < 1:
        raise ValueError(f"multiple={multiple} must be at least 1")
    return (counts + multiple - 1) // multiple * multiple
