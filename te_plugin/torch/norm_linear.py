"""RMSNorm + linear, and the llama MLP, in FP8 without a BF16 tensor between an op and the quantisation of its output.

RMSNorm, SwiGLU and SwiGLU's gradient hand FP8 copies to the products that follow (fused_quantize.py). Every number, gradient,
scale and history equals those of the separate functions; in bf16 and fp32 this is exactly what runs. Two things still need the
BF16 values and take the separate ops: the first step of delayed scaling, which calibrates on them, and what a plan refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_plugin import numerics
from te_plugin.torch.call import apply
from te_plugin.torch.fused_quantize import FusedOptions, dswiglu_quantize, fused_options, norm_quantize, swiglu_quantize
from te_plugin.torch.gemm import Operand, scaled_gemm
from te_plugin.torch.linear import (
    LinearOptions,
    cast,
    cast_weight,
    check_call,
    cut_rows,
    fp8_gradients,
    linear,
    linear_options,
    masked_rows,
    padded_rows,
    saved_operands,
)
from te_plugin.torch.options import options as options_of
from te_plugin.torch.pointwise import PointwiseOptions, rms_norm, swiglu
from te_plugin.torch.quantize import QuantizedTensor
from te_plugin.torch.state import LinearState, operand_options


@dataclass(frozen=True)
class NormLinearOptions:
    """The non-tensor arguments of these layers.

    grad_enabled: autograd records the call. reduce_gradient: called on the gradient of the normed tensor before RMSNorm's
    backward (tensor parallelism adds up its ranks' parts there), and gives the gradient to go on with.
    """

    linear: LinearOptions
    eps: float = 1e-5
    grad_enabled: bool = True
    reduce_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None

    def pointwise(self) -> PointwiseOptions:
        return options_of(PointwiseOptions, self.eps, False, "auto", self.linear.fallback)


def _cast_options(operand: str, transpose: bool, state: LinearState | None,
                  o: NormLinearOptions) -> tuple[FusedOptions, torch.Tensor | None]:
    """How a fused kernel quantises an operand of a layer: options, and the given scale (fp8_delayed)."""
    if state is None:
        cast_to, scale = operand_options(numerics.scaling(o.linear.precision), operand, o.linear.pow2_scale, transpose), None
    else:
        cast_to, scale = state.cast_of(operand, transpose)
    return fused_options(cast_to, o.eps, fallback=o.linear.fallback), scale


def _norm_cast(x, norm_weight, transpose, record, state, o: NormLinearOptions) -> tuple[QuantizedTensor, torch.Tensor]:
    """RMSNorm of x as the quantised activation of a layer, and rstd."""
    if state is not None and state.needs_values("activation"):
        y, rstd = torch.ops.te_plugin.rms_norm_forward(x, norm_weight, o.pointwise().key())
        return cast(y, "activation", transpose, record, state, o.linear), rstd
    options, scale = _cast_options("activation", transpose, state, o)
    made, rstd = norm_quantize(x, norm_weight, options, scale)
    if state is not None:
        state.note("activation", made, record)
    return made, rstd


def _swiglu_cast(h, transpose, record, state, o: NormLinearOptions) -> QuantizedTensor:
    if state is not None and state.needs_values("activation"):
        y = torch.ops.te_plugin.swiglu_forward(h, o.pointwise().key())
        return cast(y, "activation", transpose, record, state, o.linear)
    made = swiglu_quantize(h, *_cast_options("activation", transpose, state, o))
    if state is not None:
        state.note("activation", made, record)
    return made


def _dswiglu_cast(dy, h, transpose, state, o: NormLinearOptions) -> QuantizedTensor:
    if state is not None and state.needs_values("gradient"):
        dh = torch.ops.te_plugin.swiglu_backward(dy, h, o.pointwise().key())
        return cast(dh, "gradient", transpose, True, state, o.linear)
    made = dswiglu_quantize(dy, h, *_cast_options("gradient", transpose, state, o))
    if state is not None:
        state.note("gradient", made, True)
    return made


def _norm_backward(dnormed, x, norm_weight, rstd, o: NormLinearOptions):
    """(dx, dw) of RMSNorm from the gradient of its output; rows past those of x were padding."""
    dnormed, rstd = cut_rows(dnormed, x), cut_rows(rstd, x)
    if o.reduce_gradient is not None:
        dnormed = o.reduce_gradient(dnormed)
    dx, dw = torch.ops.te_plugin.rms_norm_backward(dnormed, x, norm_weight, rstd, o.pointwise().key())
    return dx, dw.to(norm_weight.dtype)


class _Fp8NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, weight, state: LinearState | None, o: NormLinearOptions):
        need_dx = o.grad_enabled and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        need_dw = o.grad_enabled and ctx.needs_input_grad[2]
        keep, record = o.linear.keep_transpose and need_dx, need_dx or need_dw
        xq, rstd = _norm_cast(padded_rows(x, o.linear.precision), norm_weight, need_dw, record, state, o)
        wq = cast_weight(weight, keep, record, state, o.linear)
        y = scaled_gemm(Operand.rowwise(xq), Operand.rowwise(wq), x.dtype, None, o.linear.kernel, o.linear.fallback)
        ctx.save_for_backward(x, norm_weight, rstd, *saved_operands(xq, wq, keep, weight))
        ctx.state, ctx.o = state, o
        return y  # with padded_rows' zeros: the caller cuts them, because a view made here could not be changed in place

    @staticmethod
    def backward(ctx, dy):
        x, norm_weight, rstd, *product = ctx.saved_tensors
        state, o = ctx.state, ctx.o
        need_dx, need_dw = ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        dyq = cast(dy, "gradient", need_dw, True, state, o.linear)
        dnormed, dw = fp8_gradients(dyq, dy.dtype, product, state, o.linear, need_dx, need_dw)
        dx, dnw = _norm_backward(dnormed, x, norm_weight, rstd, o) if need_dx else (None, None)
        return dx, dnw, dw, None, None


class _Fp8MLP(torch.autograd.Function):
    """RMSNorm (unless norm_weight is None), fc1, SwiGLU, fc2: h = [gate | up] is the only tensor between that BF16 sees."""

    @staticmethod
    def forward(ctx, x, norm_weight, w1, w2, state1: LinearState | None, state2: LinearState | None, o: NormLinearOptions):
        need = [o.grad_enabled and needed for needed in ctx.needs_input_grad]
        need_dx = need[0] or need[1]
        need_dh = record1 = need_dx or need[2]
        record2 = need_dh or need[3]
        keep1, keep2 = o.linear.keep_transpose and need_dx, o.linear.keep_transpose and need_dh
        kernel, fallback = o.linear.kernel, o.linear.fallback
        rows = padded_rows(x, o.linear.precision)
        if norm_weight is None:
            xq, rstd = cast(rows, "activation", need[2], record1, state1, o.linear), None
        else:
            xq, rstd = _norm_cast(rows, norm_weight, need[2], record1, state1, o)
        w1q = cast_weight(w1, keep1, record1, state1, o.linear)
        h = scaled_gemm(Operand.rowwise(xq), Operand.rowwise(w1q), x.dtype, None, kernel, fallback)
        aq = _swiglu_cast(h, need[3], record2, state2, o)
        w2q = cast_weight(w2, keep2, record2, state2, o.linear)
        y = scaled_gemm(Operand.rowwise(aq), Operand.rowwise(w2q), x.dtype, None, kernel, fallback)
        ctx.save_for_backward(None if norm_weight is None else x, norm_weight, rstd, h, *saved_operands(xq, w1q, keep1, w1),
                              *saved_operands(aq, w2q, keep2, w2))
        ctx.states, ctx.o, ctx.rows = (state1, state2), o, x.shape[0]
        return y  # with padded_rows' zeros, as above

    @staticmethod
    def backward(ctx, dy):
        x, norm_weight, rstd, h, *products = ctx.saved_tensors
        (state1, state2), o, need = ctx.states, ctx.o, ctx.needs_input_grad
        need_dx = need[0] or need[1]
        need_dh = need_dx or need[2]
        dyq = cast(dy, "gradient", need[3], True, state2, o.linear)
        da, dw2 = fp8_gradients(dyq, dy.dtype, products[5:], state2, o.linear, need_dh, need[3])
        dx = dnw = dw1 = None
        if need_dh:
            dhq = _dswiglu_cast(da, h, need[2], state1, o)
            dx, dw1 = fp8_gradients(dhq, dy.dtype, products[:5], state1, o.linear, need_dx, need[2])
        if need_dx and norm_weight is not None:
            dx, dnw = _norm_backward(dx, x, norm_weight, rstd, o)
        elif need_dx:
            dx = dx if dx.shape[0] == ctx.rows else dx[:ctx.rows]
            dx = dx if o.reduce_gradient is None else o.reduce_gradient(dx)
        return dx, dnw, dw1, dw2, None, None, None


class _ReduceGradient(torch.autograd.Function):
    """The tensor itself; its gradient passes through a function."""

    @staticmethod
    def forward(ctx, x, reduce_gradient):
        ctx.reduce_gradient = reduce_gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.reduce_gradient(dy), None


def _check(x, norm_weight, weight) -> None:
    if norm_weight is not None and x.shape[-1:] != norm_weight.shape:
        raise ValueError(f"norm_weight has shape {tuple(norm_weight.shape)}, x has {x.shape[-1]} features")
    if norm_weight is not None and norm_weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, norm_weight is {norm_weight.dtype}; they must agree")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} features, weight[N,K] has K={weight.shape[-1]}")


def _normed(x, norm_weight, o: NormLinearOptions) -> torch.Tensor:
    y = x if norm_weight is None else rms_norm(x, norm_weight, o.eps, fallback=o.linear.fallback)
    return y if o.reduce_gradient is None else _ReduceGradient.apply(y, o.reduce_gradient)


def _linear(x, weight, state, row_mask, o: LinearOptions) -> torch.Tensor:
    return linear(x, weight, None, o.precision, state=state, row_mask=row_mask, pow2_scale=o.pow2_scale,
                  keep_transpose=o.keep_transpose, accumulate_main_grad=o.accumulate_main_grad, kernel=o.kernel,
                  fallback=o.fallback)


def layer_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    precision: str = "bf16",
    *,
    state: LinearState | None = None,
    row_mask: torch.Tensor | None = None,
    pow2_scale: bool = False,
    keep_transpose: bool = True,
    accumulate_main_grad: bool = False,
    reduce_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
    kernel: str = "auto",
    fallback: str = "error",
) -> torch.Tensor:
    """y[...,N] = RMSNorm(x[...,K]; norm_weight[K], eps) weight[N,K]^T + bias[N].

    In FP8 the normed tensor is quantised where it is made. The values are those of rms_norm followed by linear, whose arguments
    these are. reduce_gradient: see NormLinearOptions; it must be a module-level function or otherwise hashable.
    """
    _check(x, norm_weight, weight)
    options = NormLinearOptions(linear_options(precision, pow2_scale, keep_transpose, accumulate_main_grad, kernel, fallback),
                                float(eps), torch.is_grad_enabled(), reduce_gradient)
    if numerics.scaling(precision) is None:
        return linear(_normed(x, norm_weight, options), weight, bias, precision, state=state, row_mask=row_mask,
                      accumulate_main_grad=accumulate_main_grad, kernel=kernel, fallback=fallback)
    check_call(weight, state, options.linear)
    # Rows of zeros stay zeros under RMSNorm: masking before it is masking after it, and NaN there is never read.
    rows = masked_rows(x, row_mask).contiguous()
    y = cut_rows(apply(_Fp8NormLinear, (rows, norm_weight, weight), state, options), rows)
    y = masked_rows(y if bias is None else y + bias, row_mask)  # so that no gradient comes back to the masked rows
    return y.view(*x.shape[:-1], weight.shape[0])


def gated_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    eps: float = 1e-5,
    precision: str = "bf16",
    *,
    states: tuple[LinearState | None, LinearState | None] = (None, None),
    row_mask: torch.Tensor | None = None,
    pow2_scale: bool = False,
    keep_transpose: bool = True,
    accumulate_main_grad: bool = False,
    reduce_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
    kernel: str = "auto",
    fallback: str = "error",
) -> torch.Tensor:
    """y[...,K] = SwiGLU(RMSNorm(x[...,K]) fc1_weight[2F,K]^T) fc2_weight[K,F]^T; fc1 gives [gate | up].

    norm_weight None: x is normed already. In FP8 no BF16 tensor lies between RMSNorm, SwiGLU, its gradient and the quantisation
    of their results. The values are those of rms_norm, linear, swiglu, linear, whose arguments these are; `states` are those of
    fc1 and fc2.
    """
    _check(x, norm_weight, fc1_weight)
    if fc1_weight.shape[0] != 2 * fc2_weight.shape[1]:
        raise ValueError(f"fc1_weight[2F,K] has {fc1_weight.shape[0]} rows, fc2_weight[K,F] has F={fc2_weight.shape[1]}")
    options = NormLinearOptions(linear_options(precision, pow2_scale, keep_transpose, accumulate_main_grad, kernel, fallback),
                                float(eps), torch.is_grad_enabled(), reduce_gradient)
    if numerics.scaling(precision) is None:
        h = _linear(_normed(x, norm_weight, options), fc1_weight, states[0], row_mask, options.linear)
        return _linear(swiglu(h, fallback=fallback), fc2_weight, states[1], row_mask, options.linear)
    for weight, state in zip((fc1_weight, fc2_weight), states, strict=True):
        check_call(weight, state, options.linear)
    rows = masked_rows(x, row_mask).contiguous()
    y = apply(_Fp8MLP, (rows, norm_weight, fc1_weight, fc2_weight), *states, options)
    return masked_rows(cut_rows(y, rows), row_mask).view(*x.shape[:-1], fc2_weight.shape[0])
