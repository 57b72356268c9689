"""y = x W^T for torch in every precision, forward and backward.

Three products: y = x W^T, dx = dy W, dW = dy^T x. FP8 operands are K-major in each of them, so x, W and dy are quantised once
with a transposed copy where a later product contracts over the other dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_plugin import numerics
from te_plugin.ops.linear_checks import check_features
from te_plugin.torch.gemm import Operand, plain_gemm, scaled_gemm
from te_plugin.torch.options import options as options_of
from te_plugin.torch.quantize import quantize_2d
from te_plugin.torch.state import LinearState, operand_options


@dataclass(frozen=True)
class LinearOptions:
    """The non-tensor arguments of a linear call.

    keep_transpose: keep W^T in FP8 from forward to backward, or quantise W again in backward.
    accumulate_main_grad: add dW to weight.main_grad (FP32) and return no gradient for the weight.
    """

    precision: str = "bf16"
    pow2_scale: bool = False
    keep_transpose: bool = True
    accumulate_main_grad: bool = False
    kernel: str = "auto"
    fallback: str = "error"


class _PlainLinear(torch.autograd.Function):
    """BF16/FP32 with the same products; exists so that main_grad accumulation and kernel choice hold in every precision."""

    @staticmethod
    def forward(ctx, x, weight, o: LinearOptions):
        ctx.save_for_backward(x, weight)
        ctx.o = o
        return plain_gemm(x, weight, o.kernel, o.fallback)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = torch.mm(dy, weight) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            if ctx.o.accumulate_main_grad:
                weight.main_grad.add_(_mm_fp32(dy.t(), x))
                dw = _main_grad_done(weight)
            else:
                dw = torch.mm(dy.t(), x)
        return dx, dw, None


def _mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b in FP32 from BF16 operands: cuBLASLt writes FP32 itself; on the CPU the operands are widened first."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _fp8_forward(x, weight, state: LinearState | None, o: LinearOptions, kind, need_dx: bool, need_dw: bool):
    """y and the quantised x and weight, with the transposed copies that the gradients need."""
    keep = o.keep_transpose and need_dx
    if state is None:
        xq = quantize_2d(x, operand_options(kind, "activation", o.pow2_scale, need_dw))
        wq = quantize_2d(weight, operand_options(kind, "weight", o.pow2_scale, keep))
    else:
        record = need_dx or need_dw
        xq = state.quantize(x, "activation", need_dw, record)
        wq = state.quantized_weight(weight, keep, record)
    return scaled_gemm(Operand.rowwise(xq), Operand.rowwise(wq), x.dtype, None, o.kernel, o.fallback), xq, wq


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, state: LinearState | None, o: LinearOptions):
        kind = numerics.scaling(o.precision)
        need_dx, need_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        keep = o.keep_transpose and need_dx
        y, xq, wq = _fp8_forward(x, weight, state, o, kind, need_dx, need_dw)
        ctx.save_for_backward(xq.data_t, xq.scale_inv_t, wq.data_t if keep else None, wq.scale_inv_t if keep else None, weight)
        ctx.state, ctx.o, ctx.kind = state, o, kind
        return y

    @staticmethod
    def backward(ctx, dy):
        x_t, x_scale_t, w_t, w_scale_t, weight = ctx.saved_tensors
        o, kind, state = ctx.o, ctx.kind, ctx.state
        need_dx, need_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        if state is None:
            dyq = quantize_2d(dy, operand_options(kind, "gradient", o.pow2_scale, need_dw))
        else:
            dyq = state.quantize(dy, "gradient", need_dw, True)
        dx = dw = None
        if need_dx:
            if w_t is None:
                options = operand_options(kind, "weight", o.pow2_scale, True)
                wq = quantize_2d(weight, options) if state is None else state.quantize(weight.detach(), "weight", True, False)
                w_t, w_scale_t = wq.data_t, wq.scale_inv_t
            right = Operand(w_t, w_scale_t, kind.weight, kind.forward_format.name)
            dx = scaled_gemm(Operand.rowwise(dyq), right, dy.dtype, None, o.kernel, o.fallback)
        if need_dw:
            right = Operand(x_t, x_scale_t, kind.activation, kind.forward_format.name)
            if o.accumulate_main_grad:
                scaled_gemm(Operand.transposed(dyq), right, torch.float32, weight.main_grad, o.kernel, o.fallback)
                dw = _main_grad_done(weight)
            else:
                dw = scaled_gemm(Operand.transposed(dyq), right, weight.dtype, None, o.kernel, o.fallback)
        return dx, dw, None, None


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
    kernel: str = "auto",
    fallback: str = "error",
) -> torch.Tensor:
    """y[...,N] = x[...,K] weight[N,K]^T + bias[N].

    precision: fp32, bf16 (the tensors' own dtype), or an FP8 scaling of numerics.SCALINGS. fp8_delayed needs a `state`.
    state: the layer's LinearState (weight cache, histories). row_mask: bool[...] of the leading shape; rows that are False
    count as zero everywhere (padding never enters an amax or a gradient).
    accumulate_main_grad: dW is added to weight.main_grad[N,K] (FP32) once a call, and weight gets no .grad.
    Raises ValueError for sizes that do not fit, naming the size at fault.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} features, weight[N,K] has K={weight.shape[-1]}")
    kind = numerics.scaling(precision)
    check_features(weight.shape[1], weight.shape[0], precision)
    if accumulate_main_grad and getattr(weight, "main_grad", None) is None:
        raise ValueError("accumulate_main_grad=True needs weight.main_grad, an FP32 tensor of the weight's shape")
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if row_mask is not None:
        flat = torch.where(row_mask.reshape(-1, 1), flat, 0)
    options = options_of(LinearOptions, precision, bool(pow2_scale), bool(keep_transpose), bool(accumulate_main_grad), kernel,
                         fallback)
    # Without a graph to build, autograd's bookkeeping (several microseconds) is left out; the arithmetic is the same.
    graph = torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad)
    if kind is None:
        y = _PlainLinear.apply(flat, weight, options) if graph else plain_gemm(flat, weight, kernel, fallback)
    else:
        if kind.delayed and state is None:
            raise ValueError(f"precision {precision} keeps amax histories: pass state=LinearState({precision!r})")
        if state is not None:
            if state.precision != precision:
                raise ValueError(f"state belongs to precision {state.precision!r}, the call asks for {precision!r}")
            state.begin(weight, torch.is_grad_enabled())
        rows = flat.shape[0]
        padding = -rows % kind.row_multiple if flat.is_cuda else 0
        if padding:
            # wgrad contracts over the rows, and tensor cores take them in multiples; rows of zeros change no amax and no sum.
            flat = torch.nn.functional.pad(flat, (0, 0, 0, padding))
        if graph:
            y = _Fp8Linear.apply(flat, weight, state, options)
        else:
            y = _fp8_forward(flat, weight, state, options, kind, flat.requires_grad, weight.requires_grad)[0]
        if padding:
            y = y[:rows]
    if bias is not None:
        y = y + bias
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])
