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
from te_plugin.ops.checks import check_flags
from te_plugin.torch.call import apply, autocast, first_derivative_only
from te_plugin.torch.fused_quantize import FusedOptions, dswiglu_quantize, fused_options, norm_quantize, swiglu_quantize
from te_plugin.torch.linear import (
    LinearOptions,
    cast,
    cast_weight,
    check_call,
    check_parameters,
    check_shapes,
    cut_rows,
    fp8_forward,
    fp8_gradients,
    linear,
    linear_options,
    mask_of_rows,
    masked_rows,
    padded_rows,
    recorded,
    saved_operands,
)
from te_plugin.torch.options import options as options_of
from te_plugin.torch.pointwise import PointwiseOptions, check_norm, rms_norm, swiglu
from te_plugin.torch.quantize import QuantizedTensor
from te_plugin.torch.state import LinearState, operand_options


@dataclass(frozen=True)
class NormLinearOptions:
    """The non-tensor arguments of these layers.

    grad_enabled: autograd records the call. return_input: what was normed is a result too. reduce_gradient: called on the
    gradient of the normed tensor before RMSNorm's backward (tensor parallelism adds up its ranks' parts there), and gives the
    gradient to go on with.
    """

    linear: LinearOptions
    eps: float = 1e-5
    grad_enabled: bool = True
    return_input: bool = False
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


def _norm_cast(x, residual, norm_weight, transpose, record, state,
               o: NormLinearOptions) -> tuple[QuantizedTensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of h as the quantised activation of a layer, rstd, and h: x (not padded), or x + residual (padded)."""
    rows = padded_rows(x, o.linear.precision)
    residual = None if residual is None else padded_rows(residual, o.linear.precision)
    if state is not None and state.needs_values("activation"):
        key = o.pointwise().key()
        if residual is None:
            h, (y, rstd) = x, torch.ops.te_plugin.rms_norm_forward(rows, norm_weight, key)
        else:
            y, h, rstd = torch.ops.te_plugin.rms_norm_residual_forward(rows, residual, norm_weight, key)
        return cast(y, "activation", transpose, record, state, o.linear), rstd, h
    options, scale = _cast_options("activation", transpose, state, o)
    made, rstd, h = norm_quantize(rows, norm_weight, options, scale, residual)
    if state is not None:
        state.note("activation", made, record)
    return made, rstd, x if residual is None else h


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


def _norm_backward(dnormed, dh, h, norm_weight, rstd, rows: int, o: NormLinearOptions):
    """(dx[rows,C], dw) of RMSNorm from the gradients of its output and of h; rows past those of h were padding."""
    dnormed, rstd = cut_rows(dnormed, h), cut_rows(rstd, h)
    if o.reduce_gradient is not None:
        dnormed = o.reduce_gradient(dnormed)
    dh = None if dh is None else dh.contiguous()
    dx, dw = torch.ops.te_plugin.rms_norm_backward(dnormed, dh, h, norm_weight, rstd, o.pointwise().key())
    return dx if dx.shape[0] == rows else dx[:rows], dw.to(norm_weight.dtype)


def _results(ctx, y, h, residual, o: NormLinearOptions):
    """What a forward returns, with padded_rows' zeros: the caller cuts them, because a view made here could not be changed in
    place. h, with return_input; without a residual it is the input itself.
    """
    ctx.set_materialize_grads(False)
    if not o.return_input:
        return y
    return y, h.view_as(h) if residual is None else h


def _only_input(dh, rows: int, has_residual: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dresidual) where no gradient reached y."""
    dx = None if dh is None else dh[:rows]
    return dx, dx if has_residual else None


class _Fp8NormLinear(torch.autograd.Function):
    """y, and h with o.return_input."""

    @staticmethod
    def forward(ctx, x, residual, norm_weight, weight, state: LinearState | None, o: NormLinearOptions):
        need = [o.grad_enabled and needed for needed in ctx.needs_input_grad]
        need_dx, need_dw = need[0] or need[1] or need[2], need[3]
        keep, record = o.linear.keep_transpose and need_dx, recorded(state, o.grad_enabled, need_dx or need_dw)
        xq, rstd, h = _norm_cast(x, residual, norm_weight, need_dw, record, state, o)
        wq = cast_weight(weight, keep, record, state, o.linear)
        y = fp8_forward(xq, wq, x.dtype, o.linear)
        ctx.save_for_backward(h, norm_weight, rstd, *saved_operands(xq, wq, keep, weight))
        ctx.state, ctx.o, ctx.rows, ctx.has_residual = state, o, x.shape[0], residual is not None
        return _results(ctx, y, h, residual, o)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy, dh=None):
        h, norm_weight, rstd, *product = ctx.saved_tensors
        state, o, need = ctx.state, ctx.o, ctx.needs_input_grad
        if dy is None:
            return *_only_input(dh, ctx.rows, ctx.has_residual), None, None, None, None
        need_dx, need_dw = need[0] or need[1] or need[2], need[3]
        dyq = cast(dy, "gradient", need_dw, True, state, o.linear)
        dnormed, dw = fp8_gradients(dyq, dy.dtype, product, state, o.linear, need_dx, need_dw)
        dx, dnw = _norm_backward(dnormed, dh, h, norm_weight, rstd, ctx.rows, o) if need_dx else (None, None)
        return dx, dx if ctx.has_residual else None, dnw, dw, None, None


class _Fp8MLP(torch.autograd.Function):
    """RMSNorm (unless norm_weight is None), fc1, SwiGLU, fc2: [gate | up] is the only tensor between that BF16 sees."""

    @staticmethod
    def forward(ctx, x, residual, norm_weight, w1, w2, state1: LinearState | None, state2: LinearState | None,
                o: NormLinearOptions):
        need = [o.grad_enabled and needed for needed in ctx.needs_input_grad]
        need_dx = need[0] or need[1] or need[2]
        need_da = need_dx or need[3]
        record1, record2 = recorded(state1, o.grad_enabled, need_da), recorded(state2, o.grad_enabled, need_da or need[4])
        keep1, keep2 = o.linear.keep_transpose and need_dx, o.linear.keep_transpose and need_da
        if norm_weight is None:
            xq = cast(padded_rows(x, o.linear.precision), "activation", need[3], record1, state1, o.linear)
            rstd = h = None
        else:
            xq, rstd, h = _norm_cast(x, residual, norm_weight, need[3], record1, state1, o)
        w1q = cast_weight(w1, keep1, record1, state1, o.linear)
        pair = fp8_forward(xq, w1q, x.dtype, o.linear)
        aq = _swiglu_cast(pair, need[4], record2, state2, o)
        w2q = cast_weight(w2, keep2, record2, state2, o.linear)
        y = fp8_forward(aq, w2q, x.dtype, o.linear)
        ctx.save_for_backward(h, norm_weight, rstd, pair, *saved_operands(xq, w1q, keep1, w1),
                              *saved_operands(aq, w2q, keep2, w2))
        ctx.states, ctx.o, ctx.rows, ctx.has_residual = (state1, state2), o, x.shape[0], residual is not None
        return _results(ctx, y, h, residual, o)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy, dh=None):
        h, norm_weight, rstd, pair, *products = ctx.saved_tensors
        (state1, state2), o, need = ctx.states, ctx.o, ctx.needs_input_grad
        if dy is None:
            return *_only_input(dh, ctx.rows, ctx.has_residual), None, None, None, None, None, None
        need_dx = need[0] or need[1] or need[2]
        need_da = need_dx or need[3]
        dyq = cast(dy, "gradient", need[4], True, state2, o.linear)
        da, dw2 = fp8_gradients(dyq, dy.dtype, products[5:], state2, o.linear, need_da, need[4])
        dx = dnw = dw1 = None
        if need_da:
            dpair = _dswiglu_cast(da, pair, need[3], state1, o)
            dx, dw1 = fp8_gradients(dpair, dy.dtype, products[:5], state1, o.linear, need_dx, need[3])
        if need_dx and norm_weight is not None:
            dx, dnw = _norm_backward(dx, dh, h, norm_weight, rstd, ctx.rows, o)
        elif need_dx:
            dx = dx if dx.shape[0] == ctx.rows else dx[:ctx.rows]
            dx = dx if o.reduce_gradient is None else o.reduce_gradient(dx)
        return dx, dx if ctx.has_residual else None, dnw, dw1, dw2, None, None, None


class _ReduceGradient(torch.autograd.Function):
    """The tensor itself; its gradient passes through a function."""

    @staticmethod
    def forward(ctx, x, reduce_gradient):
        ctx.reduce_gradient = reduce_gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.reduce_gradient(dy), None


def _check(x, residual, norm_weight, weight, bias, return_input: bool) -> None:
    check_flags(return_input=return_input)
    if norm_weight is not None:
        check_norm(x, norm_weight, residual, "norm_weight")
    elif residual is not None or return_input:
        raise ValueError("residual and return_input belong to the norm, and norm_weight=None says that there is none: pass "
                         "norm_weight, or add the residual outside")
    check_shapes(x, weight, bias)


def _options(residual, eps, return_input, reduce_gradient, o: LinearOptions) -> NormLinearOptions:
    return NormLinearOptions(o, float(eps), torch.is_grad_enabled(), return_input or residual is not None, reduce_gradient)


def _normed(x, residual, norm_weight, o: NormLinearOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The normed tensor, and h with o.return_input."""
    y, h = x, None
    if o.return_input:
        y, h = rms_norm(x, norm_weight, o.eps, residual=residual, return_input=True, fallback=o.linear.fallback)
    elif norm_weight is not None:
        y = rms_norm(x, norm_weight, o.eps, fallback=o.linear.fallback)
    return y if o.reduce_gradient is None else _ReduceGradient.apply(y, o.reduce_gradient), h


def _mask_inputs(x, residual, row_mask, o: NormLinearOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and the residual with zeros in masked rows, where they are seen in h."""
    if row_mask is None or not o.return_input:
        return x, residual
    return tuple(None if t is None else masked_rows(t, row_mask).view(x.shape) for t in (x, residual))


def _linear(x, weight, bias, state, row_mask, o: LinearOptions) -> torch.Tensor:
    return linear(x, weight, bias, o.precision, state=state, row_mask=row_mask, pow2_scale=o.pow2_scale,
                  keep_transpose=o.keep_transpose, accumulate_main_grad=o.accumulate_main_grad,
                  forward_accumulation=o.forward_accumulation, kernel=o.kernel, fallback=o.fallback)


def _fp8(function, x, residual, norm_weight, weights, states, bias, row_mask, o: NormLinearOptions):
    """y, and h with o.return_input, in x's leading shape. A bias belongs to the last of the weights."""
    for weight, state in zip(weights, states, strict=True):
        check_call(weight, state, o.linear)
    # Rows of zeros stay zeros under RMSNorm: masking before it is masking after it, and NaN there is never read.
    rows, residual_rows = (None if t is None else masked_rows(t, row_mask).contiguous() for t in (x, residual))
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    made = apply(function, (rows, residual_rows, norm_weight, *weights), *states, o)
    y, h = made if o.return_input else (made, None)
    y = cut_rows(y, rows)
    y = masked_rows(y if bias is None else y + bias.to(y.dtype), row_mask)  # so that no gradient comes back to the masked rows
    y = y.view(*x.shape[:-1], y.shape[1])
    return (y, cut_rows(h, rows).view(x.shape)) if o.return_input else y


def layer_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    precision: str = "bf16",
    *,
    residual: torch.Tensor | None = None,
    return_input: bool = False,
    state: LinearState | None = None,
    row_mask: torch.Tensor | None = None,
    pow2_scale: bool = False,
    keep_transpose: bool = True,
    accumulate_main_grad: bool = False,
    forward_accumulation: str = "fp32",
    reduce_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
    kernel: str = "auto",
    fallback: str = "error",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y[...,N] = RMSNorm(h[...,K]; norm_weight[K], eps) weight[N,K]^T + bias[N], where h is x.

    residual[...,K]: h = x + residual, and the result is (y, h); return_input: (y, h) without a residual too. The gradient of h
    is added inside RMSNorm's backward (see rms_norm). Rows that row_mask calls False are 0 in h.
    In FP8 the normed tensor is quantised where it is made. The values are those of rms_norm followed by linear, whose arguments
    these are. reduce_gradient: see NormLinearOptions; it must be a module-level function or otherwise hashable.
    """
    x, residual, norm_weight = autocast(x, residual, norm_weight)
    _check(x, residual, norm_weight, weight, bias, return_input)
    row_mask = mask_of_rows(row_mask, x)
    options = _options(residual, eps, return_input, reduce_gradient,
                       linear_options(precision, pow2_scale, keep_transpose, accumulate_main_grad, kernel, fallback,
                                      forward_accumulation))
    if numerics.scaling(precision) is None:
        x, residual = _mask_inputs(x, residual, row_mask, options)
        y, h = _normed(x, residual, norm_weight, options)
        y = _linear(y, weight, bias, state, row_mask, options.linear)
        return (y, h) if options.return_input else y
    return _fp8(_Fp8NormLinear, x, residual, norm_weight, (weight,), (state,), bias, row_mask, options)


def gated_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    eps: float = 1e-5,
    precision: str = "bf16",
    *,
    residual: torch.Tensor | None = None,
    return_input: bool = False,
    states: tuple[LinearState | None, LinearState | None] = (None, None),
    row_mask: torch.Tensor | None = None,
    pow2_scale: bool = False,
    keep_transpose: bool = True,
    accumulate_main_grad: bool = False,
    forward_accumulation: str = "fp32",
    reduce_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
    kernel: str = "auto",
    fallback: str = "error",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y[...,K] = SwiGLU(RMSNorm(h[...,K]) fc1_weight[2F,K]^T) fc2_weight[K,F]^T, where h is x; fc1 gives [gate | up].

    norm_weight None: x is normed already. residual, return_input, h: as in layer_norm_linear. In FP8 no BF16 tensor lies
    between RMSNorm, SwiGLU, its gradient and the quantisation of their results. The values are those of rms_norm, linear, swiglu,
    linear, whose arguments these are; `states` are those of fc1 and fc2.
    """
    x, residual, norm_weight = autocast(x, residual, norm_weight)
    _check(x, residual, norm_weight, fc1_weight, None, return_input)
    row_mask = mask_of_rows(row_mask, x)
    check_parameters(x, fc2_weight)
    if fc2_weight.dim() != 2 or fc1_weight.shape[0] != 2 * fc2_weight.shape[1]:
        raise ValueError(f"fc1_weight[2F,K] has {fc1_weight.shape[0]} rows, fc2_weight[K,F] has F={fc2_weight.shape[1]}")
    options = _options(residual, eps, return_input, reduce_gradient,
                       linear_options(precision, pow2_scale, keep_transpose, accumulate_main_grad, kernel, fallback,
                                      forward_accumulation))
    if numerics.scaling(precision) is None:
        x, residual = _mask_inputs(x, residual, row_mask, options)
        normed, h = _normed(x, residual, norm_weight, options)
        pair = _linear(normed, fc1_weight, None, states[0], row_mask, options.linear)
        y = _linear(swiglu(pair, fallback=fallback), fc2_weight, None, states[1], row_mask, options.linear)
        return (y, h) if options.return_input else y
    return _fp8(_Fp8MLP, x, residual, norm_weight, (fc1_weight, fc2_weight), states, None, row_mask, options)
