"""Grouped linear for torch: rows sorted by expert, one weight an expert, group sizes on the device.

x, W and dy are quantised once, as in a dense linear (linear.py); the groups enter the products alone. So a call reads every
tensor once, needs no group size on the host, and pads nothing between groups.

Legend: M rows (capacity), E experts, K in features, N out features. Rows past the last group never matter: their output and
gradient are 0, and what they hold enters no scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_plugin import numerics
from te_plugin.ops.checks import check_flags
from te_plugin.ops.linear_checks import check_features, check_pow2
from te_plugin.torch.call import apply, autocast, first_derivative_only
from te_plugin.torch.grouped_gemm import GroupedGemmOptions
from te_plugin.torch.linear import (
    LinearOptions,
    _main_grad_done,
    cast,
    cast_weight,
    check_main_grad,
    check_parameters,
    check_state,
    cut_rows,
    padded_rows,
    recorded,
    saved_operands,
)
from te_plugin.torch.options import options as options_of
from te_plugin.torch.state import LinearState


@dataclass(frozen=True)
class GroupedOptions(LinearOptions):
    """The non-tensor arguments of a grouped linear call."""

    def product(self, stage: str) -> str:
        """The options of one of its products, spelled."""
        return options_of(GroupedGemmOptions, self.precision, stage, self.kernel, self.fallback).key()


def _used_rows(group_sizes: torch.Tensor) -> torch.Tensor:
    """int64[1] on the device: the rows that belong to a group."""
    return group_sizes.sum(0, keepdim=True, dtype=torch.int64)


def _plain(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Experts' weights as the kernels read them: in `dtype`, line after line (models that hold [E,K,N] hand in a view)."""
    return weight.detach().to(dtype).contiguous()


class _PlainGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group_sizes, o: GroupedOptions):
        ctx.save_for_backward(x, weight, group_sizes)
        ctx.o = o
        return torch.ops.te_plugin.grouped_gemm(x, _plain(weight, x.dtype), group_sizes, o.product("forward"))

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weight, group_sizes = ctx.saved_tensors
        o, dy = ctx.o, dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.te_plugin.grouped_gemm_dgrad(dy, _plain(weight, dy.dtype), group_sizes, o.product("dgrad"))
        if ctx.needs_input_grad[1]:
            if o.accumulate_main_grad:
                torch.ops.te_plugin.grouped_gemm_wgrad_accumulate(dy, x, group_sizes, weight.main_grad, o.product("wgrad"))
                dw = _main_grad_done(weight)
            else:
                dw = torch.ops.te_plugin.grouped_gemm_wgrad(dy, x, group_sizes, weight.shape[0], o.product("wgrad"))
                dw = dw.to(weight.dtype)
        return dx, dw, None, None


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group_sizes, state: LinearState | None, o: GroupedOptions, grad_enabled: bool):
        need_dx, need_dw = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        keep, record = o.keep_transpose and need_dx, recorded(state, grad_enabled, need_dx or need_dw)
        used = _used_rows(group_sizes)
        xq = cast(x, "activation", need_dw, record, state, o, used)
        wq = cast_weight(weight, keep, record, state, o)
        y = torch.ops.te_plugin.scaled_grouped_gemm(xq.data, xq.scale_inv, wq.data, wq.scale_inv, group_sizes,
                                                    o.product("forward"), x.dtype)
        ctx.save_for_backward(*saved_operands(xq, wq, keep, weight), group_sizes, used)
        ctx.state, ctx.o = state, o
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x_t, x_scale_t, w_t, w_scale_t, weight, group_sizes, used = ctx.saved_tensors
        o, state = ctx.o, ctx.state
        need_dx, need_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dyq = cast(dy, "gradient", need_dw, True, state, o, used)
        dx = dw = None
        if need_dx:
            if w_t is None:
                wq = cast(weight.detach(), "weight", True, False, state, o)
                w_t, w_scale_t = wq.data_t, wq.scale_inv_t
            dx = torch.ops.te_plugin.scaled_grouped_gemm(dyq.data, dyq.scale_inv, w_t, w_scale_t, group_sizes,
                                                         o.product("dgrad"), dy.dtype)
        if need_dw:
            operands = dyq.data_t, dyq.scale_inv_t, x_t, x_scale_t, group_sizes
            if o.accumulate_main_grad:
                torch.ops.te_plugin.scaled_grouped_wgrad_accumulate(*operands, weight.main_grad, o.product("wgrad"))
                dw = _main_grad_done(weight)
            else:
                dw = torch.ops.te_plugin.scaled_grouped_wgrad(*operands, weight.shape[0], o.product("wgrad"), weight.dtype)
        return dx, dw, None, None, None, None


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_sizes: torch.Tensor,
    precision: str = "bf16",
    *,
    state: LinearState | None = None,
    pow2_scale: bool = False,
    keep_transpose: bool = True,
    accumulate_main_grad: bool = False,
    kernel: str = "auto",
    fallback: str = "error",
) -> torch.Tensor:
    """y[M,N]: row m of group e times weight[e,N,K]^T; rows are sorted by group.

    group_sizes: int32 or int64 [E] on x's device, summing to at most M. Empty groups, one group and surplus rows are legal; dW of
    an empty group is exactly 0. Scales: weights per expert; x and dy as `precision` says, over the rows of all groups together
    (docs/numerics.md). state: the layer's LinearState (weight cache). accumulate_main_grad: dW is added to
    weight.main_grad[E,N,K] (FP32) once a call, and weight gets no .grad.
    Raises ValueError for sizes that do not fit, naming the size at fault.
    """
    x, = autocast(x)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"grouped_linear takes x[M,K] and weight[E,N,K]; got {tuple(x.shape)} and {tuple(weight.shape)}")
    check_parameters(x, weight)
    if not weight.shape[0]:
        raise ValueError(f"weight{tuple(weight.shape)} holds no expert; at least one is needed")
    if not isinstance(group_sizes, torch.Tensor):
        raise ValueError(f"group_sizes must be an int32 or int64 tensor on {x.device}, got {type(group_sizes).__name__}")
    if group_sizes.shape != (weight.shape[0],):
        raise ValueError(f"group_sizes has shape {tuple(group_sizes.shape)}, weight holds {weight.shape[0]} experts")
    if group_sizes.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"group_sizes must be int32 or int64, got {group_sizes.dtype}")
    if group_sizes.device != x.device:
        raise ValueError(f"group_sizes is on {group_sizes.device}, x on {x.device}")
    refuse_delayed(precision)
    check_features(weight.shape[2], weight.shape[1], precision)
    if accumulate_main_grad:
        check_main_grad(weight)
    check_flags(pow2_scale=pow2_scale, keep_transpose=keep_transpose, accumulate_main_grad=accumulate_main_grad)
    check_pow2(precision, pow2_scale)
    options = options_of(GroupedOptions, precision, pow2_scale, keep_transpose, accumulate_main_grad, kernel, fallback)
    if numerics.scaling(precision) is None:  # a layer evaluated in BF16 leaves its FP8 state alone
        return apply(_PlainGroupedLinear, (x.contiguous(), weight, group_sizes), options)
    if state is not None:
        check_state(state, options)
    rows = padded_rows(x, precision)  # surplus rows like any others
    return cut_rows(apply(_Fp8GroupedLinear, (rows, weight, group_sizes), state, options, torch.is_grad_enabled()), x)


def refuse_delayed(precision: str) -> None:
    """ValueError for delayed scaling of experts."""
    kind = numerics.scaling(precision)
    if kind is not None and kind.delayed:
        raise ValueError(f"precision {precision} keeps a history per tensor, and the rows of an expert differ from step to step; "
                         f"use fp8_current, fp8_rowwise, fp8_block or mxfp8 for experts")


def align_groups(counts: torch.Tensor, multiple: int) -> torch.Tensor:
    """Group sizes rounded up to a multiple; an empty group stays empty."""
    if not isinstance(multiple, int) or multiple < 1:
        raise ValueError(f"multiple={multiple} must be a whole number of at least 1")
    return (counts + multiple - 1) // multiple * multiple
