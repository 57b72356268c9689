"""y = x W^T for torch in every precision, forward and backward.

Three products: y = x W^T, dx = dy W, dW = dy^T x. FP8 operands are K-major in each of them, so x, W and dy are quantised once
with a transposed copy where a later product contracts over the other dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from te_plugin import numerics
from te_plugin.ops.checks import check_flags
from te_plugin.ops.linear_checks import check_accumulation, check_features, check_pow2
from te_plugin.torch.call import DTYPE_NAME, apply, autocast, check_device, first_derivative_only
from te_plugin.torch.gemm import Operand, plain_gemm, scaled_gemm
from te_plugin.torch.options import options as options_of
from te_plugin.torch.quantize import QuantizedTensor, quantize_operand
from te_plugin.torch.state import LinearState, operand_options


@dataclass(frozen=True)
class LinearOptions:
    """The non-tensor arguments of a linear call.

    keep_transpose: keep W^T in FP8 from forward to backward, or quantise W again in backward.
    accumulate_main_grad: add dW to weight.main_grad (FP32) and return no gradient for the weight.
    forward_accumulation: how y = x W^T adds up in FP8; the gradients' products always add in FP32.
    """

    precision: str = "bf16"
    pow2_scale: bool = False
    keep_transpose: bool = True
    accumulate_main_grad: bool = False
    kernel: str = "auto"
    fallback: str = "error"
    forward_accumulation: str = "fp32"


def linear_options(precision: str, pow2_scale: bool, keep_transpose: bool, accumulate_main_grad: bool, kernel: str,
                   fallback: str, forward_accumulation: str) -> LinearOptions:
    """The same object for the same arguments."""
    check_flags(pow2_scale=pow2_scale, keep_transpose=keep_transpose, accumulate_main_grad=accumulate_main_grad)
    check_pow2(precision, pow2_scale)
    return options_of(LinearOptions, precision, pow2_scale, keep_transpose, accumulate_main_grad, kernel, fallback,
                      forward_accumulation)


class _PlainLinear(torch.autograd.Function):
    """BF16/FP32 with the same products; exists so that main_grad accumulation and kernel choice hold in every precision.

    A weight of another dtype than x (autocast) computes in x's and gets its gradient in its own.
    """

    @staticmethod
    def forward(ctx, x, weight, o: LinearOptions):
        ctx.save_for_backward(x, weight)
        ctx.o = o
        return plain_gemm(x, weight.to(x.dtype), o.kernel, o.fallback)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        o = ctx.o
        dx = plain_gemm(dy, weight.to(dy.dtype).t(), o.kernel, o.fallback) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            if o.accumulate_main_grad:
                weight.main_grad.add_(_mm_fp32(dy.t(), x))
                dw = _main_grad_done(weight)
            else:
                dw = plain_gemm(dy.t(), x.t(), o.kernel, o.fallback).to(weight.dtype)
        return dx, dw, None


def _mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b in FP32 from BF16 operands: cuBLASLt writes FP32 itself; on the CPU the operands are widened first."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, state: LinearState | None, o: LinearOptions, grad_enabled: bool):
        # A parameter needs its gradient under no_grad too: only the caller knows that autograd records nothing.
        need_dx, need_dw = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        keep = o.keep_transpose and need_dx
        record = recorded(state, grad_enabled, need_dx or need_dw)
        xq = cast(x, "activation", need_dw, record, state, o)
        wq = cast_weight(weight, keep, record, state, o)
        y = fp8_forward(xq, wq, x.dtype, o)
        ctx.save_for_backward(*saved_operands(xq, wq, keep, weight))
        ctx.state, ctx.o = state, o
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        need_dx, need_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dyq = cast(dy, "gradient", need_dw, True, ctx.state, ctx.o)
        dx, dw = fp8_gradients(dyq, dy.dtype, ctx.saved_tensors, ctx.state, ctx.o, need_dx, need_dw)
        return dx, dw, None, None, None


def recorded(state: LinearState | None, grad_enabled: bool, needed: bool) -> bool:
    """LinearState.records; without a state there is nothing to record in."""
    return state is not None and state.records(grad_enabled, needed)


def cast(x: torch.Tensor, operand: str, transpose: bool, record: bool, state: LinearState | None, o: LinearOptions,
         used: torch.Tensor | None = None) -> QuantizedTensor:
    """x[R,C], or experts' weights [E,N,K], in FP8 as one operand (activation, weight or gradient) of a layer. used: as in
    quantize_2d."""
    if state is not None:
        return state.quantize(x, operand, transpose, record, used)
    return quantize_operand(x, operand_options(numerics.scaling(o.precision), operand, o.pow2_scale, transpose), used=used)


def cast_weight(weight: torch.Tensor, transpose: bool, record: bool, state: LinearState | None,
                o: LinearOptions) -> QuantizedTensor:
    """The weight in FP8, from the cache of its state where there is one."""
    if state is not None:
        return state.quantized_weight(weight, transpose, record)
    return cast(weight.detach(), "weight", transpose, record, None, o)


def saved_operands(xq: QuantizedTensor, wq: QuantizedTensor, keep: bool, weight: torch.Tensor) -> tuple:
    """What the gradients of a product need: x^T and its scales, W^T and its scales (keep; else None), W."""
    return xq.data_t, xq.scale_inv_t, wq.data_t if keep else None, wq.scale_inv_t if keep else None, weight


def fp8_forward(xq: QuantizedTensor, wq: QuantizedTensor, dtype: torch.dtype, o: LinearOptions) -> torch.Tensor:
    """y = x W^T in `dtype` from the quantised operands."""
    return scaled_gemm(Operand.rowwise(xq), Operand.rowwise(wq), dtype, None, o.kernel, o.fallback, o.forward_accumulation)


def fp8_gradients(dyq: QuantizedTensor, dtype: torch.dtype, saved, state: LinearState | None, o: LinearOptions, need_dx: bool,
                  need_dw: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx in `dtype`, dw) of y = x W^T from the quantised dy.

    saved: saved_operands; without W^T, W is quantised again. dw is None, or Megatron's placeholder, when it
    went into main_grad.
    """
    x_t, x_scale_t, w_t, w_scale_t, weight = saved
    kind = numerics.scaling(o.precision)
    dx = dw = None
    if need_dx:
        if w_t is None:
            wq = cast(weight.detach(), "weight", True, False, state, o)
            w_t, w_scale_t = wq.data_t, wq.scale_inv_t
        right = Operand(w_t, w_scale_t, kind.weight, kind.forward_format.name)
        dx = scaled_gemm(Operand.rowwise(dyq), right, dtype, None, o.kernel, o.fallback)
    if need_dw:
        right = Operand(x_t, x_scale_t, kind.activation, kind.forward_format.name)
        if o.accumulate_main_grad:
            scaled_gemm(Operand.transposed(dyq), right, torch.float32, weight.main_grad, o.kernel, o.fallback)
            dw = _main_grad_done(weight)
        else:
            dw = scaled_gemm(Operand.transposed(dyq), right, weight.dtype, None, o.kernel, o.fallback)
    return dx, dw


def _main_grad_done(weight: torch.Tensor) -> torch.Tensor | None:
    """Megatron's protocol: the gradient is in main_grad already; hooks still want to fire, so they get a placeholder."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    return None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    precision: str = "bf16",
    *,
    state: LinearState | None = None,
    row_mask: torch.Tensor | None = None,
    pow2_scale: bool = False,
    keep_transpose: bool = True,
    accumulate_main_grad: bool = False,
    forward_accumulation: str = "fp32",
    kernel: str = "auto",
    fallback: str = "error",
) -> torch.Tensor:
    """y[...,N] = x[...,K] weight[N,K]^T + bias[N].

    precision: fp32, bf16 (the dtype of x), or an FP8 scaling of numerics.SCALINGS. fp8_delayed needs a `state`. y has the dtype
    of x, which torch.autocast casts where it is on; weight and bias may be of another.
    state: the layer's LinearState (weight cache, histories). row_mask: bool[...] of the leading shape; rows that are False
    count as zero everywhere: their output is 0, and neither x nor dy there enters an amax or a gradient, whatever they hold.
    accumulate_main_grad: dW is added to weight.main_grad[N,K] (FP32) once a call, and weight gets no .grad.
    forward_accumulation: fp32, or fast: on Hopper y is summed in the tensor cores' own 14 bits, which takes less time
    (docs/numerics.md); for fp8_current, fp8_delayed and fp8_rowwise. dx and dW add in FP32 either way.
    Raises ValueError for sizes that do not fit, naming the size at fault.
    """
    x, = autocast(x)
    check_shapes(x, weight, bias)
    options = linear_options(precision, pow2_scale, keep_transpose, accumulate_main_grad, kernel, fallback,
                             forward_accumulation)
    check_call(weight, state, options)
    row_mask = mask_of_rows(row_mask, x)
    flat = masked_rows(x, row_mask)
    if numerics.scaling(precision) is None:
        y = apply(_PlainLinear, (flat, weight), options)
    else:
        y = cut_rows(apply(_Fp8Linear, (padded_rows(flat, precision), weight), state, options, torch.is_grad_enabled()), flat)
    if bias is not None:
        y = y + bias.to(y.dtype)
    y = masked_rows(y, row_mask)  # so that no gradient comes back to the masked rows
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def check_shapes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """ValueError for operands that do not go together, naming the one at fault."""
    check_parameters(x, weight, bias)
    if x.dim() < 1 or weight.dim() != 2:
        raise ValueError(f"linear takes x[...,K] and weight[N,K]; got x{tuple(x.shape)} and weight{tuple(weight.shape)}")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} features, weight[N,K] has K={weight.shape[-1]}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, weight[N,K] has N={weight.shape[0]}")


def check_parameters(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """ValueError for parameters that lie elsewhere than x or hold no values of their own: integers, FP8 codes without scales."""
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        check_device("linear", name, tensor, x.device)
        if tensor.dtype not in DTYPE_NAME:
            raise ValueError(f"{name} is {tensor.dtype}; it must hold its values, in one of {', '.join(map(str, DTYPE_NAME))}: "
                             f"dequantize it first")


def check_call(weight: torch.Tensor, state: LinearState | None, o: LinearOptions) -> None:
    """ValueError for what a linear call cannot do; tells the state that a forward begins."""
    check_features(weight.shape[1], weight.shape[0], o.precision)
    check_accumulation(o.forward_accumulation, o.precision)
    if o.accumulate_main_grad:
        check_main_grad(weight)
    kind = numerics.scaling(o.precision)
    if kind is None:
        return
    if kind.delayed and state is None:
        raise ValueError(f"precision {o.precision} keeps amax histories: pass state=LinearState({o.precision!r})")
    if state is not None:
        check_state(state, o)
        state.begin(weight)


def check_state(state: LinearState, o: LinearOptions) -> None:
    """ValueError where a layer's state was made for another way to quantise than the call asks for."""
    if state.precision != o.precision:
        raise ValueError(f"state belongs to precision {state.precision!r}, the call asks for {o.precision!r}")
    if state.pow2_scale != o.pow2_scale:
        raise ValueError(f"state has pow2_scale={state.pow2_scale}, the call asks for {o.pow2_scale}; give both the same")


def check_main_grad(weight: torch.Tensor) -> None:
    """ValueError unless weight.main_grad is an FP32 tensor of the weight's shape on its device, where one is to be added to."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return
    grad = getattr(weight, "main_grad", None)
    wanted = (torch.float32, weight.shape, weight.device)
    if grad is None or (grad.dtype, grad.shape, grad.device) != wanted:
        found = "there is none" if grad is None else f"it is {grad.dtype} {tuple(grad.shape)} on {grad.device}"
        raise ValueError(f"accumulate_main_grad=True needs weight.main_grad, FP32 {tuple(weight.shape)} on {weight.device}; "
                         f"{found}")


def mask_of_rows(row_mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """row_mask[R] for the rows of x[...,C]; ValueError unless it has their leading shape, or is flat already."""
    if row_mask is None:
        return None
    if row_mask.dtype != torch.bool:
        raise ValueError(f"row_mask is {row_mask.dtype}; it must be bool, True for the rows that count")
    if row_mask.shape not in (x.shape[:-1], (math.prod(x.shape[:-1]),)):
        raise ValueError(f"row_mask has shape {tuple(row_mask.shape)}, one value a row is needed: {tuple(x.shape[:-1])}")
    return row_mask.reshape(-1)


def masked_rows(x: torch.Tensor, row_mask: torch.Tensor | None) -> torch.Tensor:
    """x[...,C] as rows [R,C], those that row_mask[R] calls False replaced by zeros."""
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return flat if row_mask is None else torch.where(row_mask[:, None], flat, 0)


def padded_rows(x: torch.Tensor, precision: str) -> torch.Tensor:
    """x[R,C] with rows of zeros up to what the tensor cores take: wgrad contracts over rows; zeros change no amax and no sum."""
    padding = -x.shape[0] % numerics.scaling(precision).row_multiple if x.is_cuda else 0
    return torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x


def cut_rows(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y without the rows that padded_rows added to x. The whole y is not sliced: the gradient of a slice is a copy."""
    return y if y.shape[0] == x.shape[0] else y[:x.shape[0]]
