"""RMSNorm, SwiGLU, rotary embedding and cross-entropy for torch.

Each op: a plan by shape, a compiled forward and backward, and framework maths where the plan says `composite`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from te_plugin.ops.activation.problem import ActivationProblem
from te_plugin.ops.checks import check_flags
from te_plugin.ops.loss.problem import LossProblem
from te_plugin.ops.norm.problem import NormProblem
from te_plugin.ops.rope.problem import RopeProblem
from te_plugin.plan import Plan, plan, remember_unmeasured
from te_plugin.torch import launches
from te_plugin.torch.call import autocast, check_device, define, dtype_name, first_derivative_only, launch, target_of
from te_plugin.torch.options import Options

IGNORED_LABEL = -100


@dataclass(frozen=True)
class PointwiseOptions(Options):
    """The non-tensor arguments of these ops: RMSNorm's eps, rope's direction, and the choice of kernel."""

    eps: float = 1e-5
    inverse: bool = False
    kernel: str = "auto"
    fallback: str = "error"


@remember_unmeasured
def _plan(problem_type, sizes: tuple, dtype: str, device, key: str) -> Plan:
    o = PointwiseOptions.from_key(key)
    extra = {"eps": o.eps} if problem_type is NormProblem else {}
    return plan(problem_type(*sizes, dtype=dtype, **extra), target_of(device), o.kernel, o.fallback)


def _composite(chosen: Plan, stage: str) -> bool:
    if chosen.kernel.library is not None:
        return False
    launches.record(chosen, stage)
    return True


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


# RMSNorm -------------------------------------------------------------------------------------------------------------------

def norm_forward_impl(x, weight, options):
    chosen = _plan(NormProblem, tuple(x.shape), dtype_name(x), x.device, options)
    eps = chosen.problem.eps
    if _composite(chosen, "forward"):
        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        return (x.float() * rstd[:, None] * weight.float()).to(x.dtype), rstd
    y = torch.empty_like(x)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    launch(chosen, "forward", x, weight, y, rstd, eps)
    return y, rstd


def norm_residual_forward_impl(x, residual, weight, options):
    """y, h = x + residual in their dtype, rstd."""
    chosen = _plan(NormProblem, tuple(x.shape), dtype_name(x), x.device, options)
    if chosen.kernel.library is None:
        h = x + residual
        y, rstd = norm_forward_impl(h, weight, options)
        return y, h, rstd
    y, h = torch.empty_like(x), torch.empty_like(x)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    launch(chosen, "residual_forward", x, residual, weight, y, h, rstd, chosen.problem.eps)
    return y, h, rstd


def norm_backward_impl(dy, dh, x, weight, rstd, options):
    """dx (+ dh, the gradient that reaches x by other ways, before the rounding) and dw."""
    chosen = _plan(NormProblem, tuple(x.shape), dtype_name(x), x.device, options)
    if _composite(chosen, "backward"):
        g, normed = dy.float() * weight.float(), x.float() * rstd[:, None]
        dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd[:, None]
        return (dx if dh is None else dx + dh.float()).to(x.dtype), (dy.float() * normed).sum(0)
    dx = torch.empty_like(x)
    dw = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    if dh is None:
        launch(chosen, "backward", dy, x, weight, rstd, dx, dw)
    else:
        launch(chosen, "residual_backward", dy, dh, x, weight, rstd, dx, dw)
    return dx, dw


define("rms_norm_forward(Tensor x, Tensor weight, str options) -> (Tensor, Tensor)", norm_forward_impl,
       lambda x, weight, options: (torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)))
define("rms_norm_residual_forward(Tensor x, Tensor residual, Tensor weight, str options) -> (Tensor, Tensor, Tensor)",
       norm_residual_forward_impl,
       lambda x, residual, weight, options: (torch.empty_like(x), torch.empty_like(x),
                                             x.new_empty(x.shape[0], dtype=torch.float32)))
define("rms_norm_backward(Tensor dy, Tensor? dh, Tensor x, Tensor weight, Tensor rstd, str options) -> (Tensor, Tensor)",
       norm_backward_impl,
       lambda dy, dh, x, weight, rstd, options: (torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, options: PointwiseOptions):
        key = options.key()
        y, rstd = torch.ops.te_plugin.rms_norm_forward(x, weight, key)
        ctx.save_for_backward(x, weight, rstd)
        ctx.key = key
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dw = torch.ops.te_plugin.rms_norm_backward(dy.contiguous(), None, x, weight, rstd, ctx.key)
        return dx, dw.to(weight.dtype), None


class _ResidualRMSNorm(torch.autograd.Function):
    """(y, h): the norm and what was normed, whose gradient comes back into the norm's backward."""

    @staticmethod
    def forward(ctx, x, residual, weight, options: PointwiseOptions):
        key = options.key()
        if residual is None:
            h = x
            y, rstd = torch.ops.te_plugin.rms_norm_forward(x, weight, key)
        else:
            y, h, rstd = torch.ops.te_plugin.rms_norm_residual_forward(x, residual, weight, key)
        ctx.save_for_backward(h, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.key, ctx.has_residual = key, residual is not None
        return y, h if residual is not None else h.view_as(h)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy, dh):
        if dy is None:
            return dh, dh if ctx.has_residual else None, None, None
        h, weight, rstd = ctx.saved_tensors
        dh = None if dh is None else dh.contiguous()
        dx, dw = torch.ops.te_plugin.rms_norm_backward(dy.contiguous(), dh, h, weight, rstd, ctx.key)
        return dx, dx if ctx.has_residual else None, dw.to(weight.dtype), None


def check_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, name: str = "weight") -> None:
    """ValueError for tensors that do not go together in a norm; `name` is that of its weight."""
    if x.dim() < 1 or weight.dim() != 1:
        raise ValueError(f"a norm takes x[...,C] and {name}[C]; got x{tuple(x.shape)} and {name}{tuple(weight.shape)}")
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}, x has {x.shape[-1]} features")
    if weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, {name} is {weight.dtype}; they must agree")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(f"residual is {residual.dtype}{list(residual.shape)}, x is {x.dtype}{list(x.shape)}; they must agree")
    check_device("norm", name, weight, x.device)
    if residual is not None:
        check_device("norm", "residual", residual, x.device)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, *, residual: torch.Tensor | None = None,
             return_input: bool = False, kernel: str = "auto",
             fallback: str = "error") -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y[...,C] = h * rsqrt(mean(h^2) + eps) * weight[C], statistics in FP32, one rounding at the end; h is x.

    residual[...,C], in the dtype of x: h = x + residual, rounded to that dtype as torch's sum, and the result is (y, h).
    return_input: (y, h) without a residual too; h then is x, not a copy.
    A gradient of h joins that of y inside the norm's backward: dx = dresidual = (FP32 gradient of the norm) + dh, rounded once,
    where a sum outside would round twice and read three more tensors. torch.compile adds it outside where h is x and leaves the
    graph (an output that is an input).
    """
    if weight.dtype != x.dtype:
        x, residual, weight = autocast(x, residual, weight)
    check_flags(return_input=return_input)
    check_norm(x, weight, residual)
    weight = weight.contiguous()
    options = PointwiseOptions(eps=float(eps), kernel=kernel, fallback=fallback)
    if residual is None and not return_input:
        return _RMSNorm.apply(_rows(x), weight, options).view(x.shape)
    y, h = _ResidualRMSNorm.apply(_rows(x), None if residual is None else _rows(residual), weight, options)
    return y.view(x.shape), h.view(x.shape)


# SwiGLU --------------------------------------------------------------------------------------------------------------------

def swiglu_forward_impl(x, options):
    rows, columns = x.shape[0], x.shape[1] // 2
    chosen = _plan(ActivationProblem, (rows, columns), dtype_name(x), x.device, options)
    if _composite(chosen, "forward"):
        gate, up = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    launch(chosen, "forward", x, y)
    return y


def swiglu_backward_impl(dy, x, options):
    chosen = _plan(ActivationProblem, (x.shape[0], x.shape[1] // 2), dtype_name(x), x.device, options)
    if _composite(chosen, "backward"):
        gate, up = x.float().chunk(2, -1)
        sigmoid, g = torch.sigmoid(gate), dy.float()
        return torch.cat([g * up * sigmoid * (1 + gate * (1 - sigmoid)), g * gate * sigmoid], -1).to(x.dtype)
    dx = torch.empty_like(x)
    launch(chosen, "backward", dy, x, dx)
    return dx


define("swiglu_forward(Tensor x, str options) -> Tensor", swiglu_forward_impl,
       lambda x, options: x.new_empty((x.shape[0], x.shape[1] // 2)))
define("swiglu_backward(Tensor dy, Tensor x, str options) -> Tensor", swiglu_backward_impl,
       lambda dy, x, options: torch.empty_like(x))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options: PointwiseOptions):
        ctx.save_for_backward(x)
        ctx.key = options.key()
        return torch.ops.te_plugin.swiglu_forward(x, ctx.key)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        return torch.ops.te_plugin.swiglu_backward(dy.contiguous(), *ctx.saved_tensors, ctx.key), None


def swiglu(x: torch.Tensor, *, kernel: str = "auto", fallback: str = "error") -> torch.Tensor:
    """x[...,2C] = [gate | up] -> silu(gate) * up [...,C]."""
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(f"swiglu halves the last dimension into gate and up, which needs an even one; x has shape "
                         f"{tuple(x.shape)}")
    y = _SwiGLU.apply(_rows(x), PointwiseOptions(kernel=kernel, fallback=fallback))
    return y.view(*x.shape[:-1], x.shape[-1] // 2)


# Rotary embedding ----------------------------------------------------------------------------------------------------------

def rope_impl(x, positions, inv_freq, options):
    o = PointwiseOptions.from_key(options)
    chosen = _plan(RopeProblem, tuple(x.shape), dtype_name(x), x.device, options)
    if _composite(chosen, "backward" if o.inverse else "forward"):
        angle = positions.float()[:, None, None] * inv_freq
        cos, sin = angle.cos(), angle.sin() * (-1.0 if o.inverse else 1.0)
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(chosen, "backward" if o.inverse else "forward", x, positions, inv_freq, y, int(o.inverse))
    return y


define("rope(Tensor x, Tensor positions, Tensor inv_freq, str options) -> Tensor", rope_impl,
       lambda x, positions, inv_freq, options: x.new_empty(x.shape))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, inv_freq, options: PointwiseOptions):
        ctx.save_for_backward(positions, inv_freq)
        ctx.options = options
        return torch.ops.te_plugin.rope(x, positions, inv_freq, options.key())

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        o = ctx.options
        inverse = PointwiseOptions(inverse=True, kernel=o.kernel, fallback=o.fallback)
        if dy.stride(-1) != 1:
            dy = dy.contiguous()
        return torch.ops.te_plugin.rope(dy, *ctx.saved_tensors, inverse.key()), None, None, None


def positions_of(cu_seqlens: torch.Tensor, tokens: int, cu_seqlens_padded: torch.Tensor | None = None) -> torch.Tensor:
    """int32[tokens]: the position of each row in its segment (rows of a gap count on); no host sync."""
    start = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if start.dim() != 1 or not start.shape[0]:
        raise ValueError(f"cu_seqlens has shape {tuple(start.shape)}; it holds N+1 entries in one dimension, the first is 0")
    if start.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens is {start.dtype}; it holds int32 or int64")
    rows = torch.arange(tokens, device=start.device, dtype=torch.int32)
    segment = torch.searchsorted(start.contiguous(), rows, right=True, out_int32=True) - 1
    return rows - start[segment.clamp(0, start.shape[0] - 1).long()]


def rotary_positions(name: str, x: torch.Tensor, head_dim: int, positions: torch.Tensor | None, inv_freq: torch.Tensor,
                     cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """int32[T] for the rows of x[T,...], from either of the two; ValueError for what does not fit x or is no constant."""
    pairs, tokens = head_dim // 2, x.shape[0]
    if inv_freq.shape != (pairs,) or inv_freq.dtype != torch.float32:
        raise ValueError(f"{name}: inv_freq must be FP32[{pairs}] for D={head_dim}, got {inv_freq.dtype}{list(inv_freq.shape)}")
    if inv_freq.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: inv_freq requires a gradient and would get none; pass inv_freq.detach()")
    if (positions is None) == (cu_seqlens is None):
        raise ValueError(f"{name} needs positions[T] or cu_seqlens[N+1], and not both")
    if positions is None:
        positions = positions_of(cu_seqlens, tokens)
    if positions.shape != (tokens,) or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: positions must be int32 or int64 [{tokens}], one a row, got "
                         f"{positions.dtype}{list(positions.shape)}")
    for what, tensor in (("positions" if cu_seqlens is None else "cu_seqlens", positions), ("inv_freq", inv_freq)):
        check_device(name, what, tensor, x.device)
    return positions.to(torch.int32).contiguous()


def rope(x: torch.Tensor, positions: torch.Tensor | None = None, *, inv_freq: torch.Tensor,
         cu_seqlens: torch.Tensor | None = None, kernel: str = "auto", fallback: str = "error") -> torch.Tensor:
    """Rotate x[T,H,D] by positions[T] (int32 or int64) * inv_freq[D/2] (FP32); pairs are (i, i + D/2).

    cu_seqlens[N+1] in place of positions gives positions that restart at each segment. No gradient flows to inv_freq.
    Raises ValueError for arguments that do not fit, PlanError when no kernel can run it.
    """
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"rope takes x[T,H,D] with an even D, got {tuple(x.shape)}")
    positions = rotary_positions("rope", x, x.shape[2], positions, inv_freq, cu_seqlens)
    if x.stride(-1) != 1:
        x = x.contiguous()
    return _Rope.apply(x, positions, inv_freq, PointwiseOptions(kernel=kernel, fallback=fallback))


# Cross-entropy -------------------------------------------------------------------------------------------------------------

def _places(labels: torch.Tensor) -> torch.Tensor:
    """int64[T,1], the column of each row's label. One outside the vocabulary stays outside, and torch refuses it."""
    return torch.where(labels == IGNORED_LABEL, 0, labels).long()[:, None]


def _loss_forward(logits, labels, options):
    chosen = _plan(LossProblem, tuple(logits.shape), dtype_name(logits), logits.device, options)
    if _composite(chosen, "forward"):
        lse = torch.logsumexp(logits.float(), -1)
        picked = logits.float().gather(1, _places(labels))[:, 0]
        return torch.where(labels == IGNORED_LABEL, 0.0, lse - picked), lse
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    launch(chosen, "forward", logits, labels, loss, lse)
    return loss, lse


def _loss_backward(dloss, logits, labels, lse, options):
    chosen = _plan(LossProblem, tuple(logits.shape), dtype_name(logits), logits.device, options)
    if _composite(chosen, "backward"):
        grad = torch.exp(logits.float() - lse[:, None])
        grad[torch.arange(len(labels), device=labels.device), _places(labels)[:, 0]] -= 1
        return torch.where((labels == IGNORED_LABEL)[:, None], 0.0, grad * dloss[:, None]).to(logits.dtype)
    dlogits = torch.empty_like(logits)
    launch(chosen, "backward", dloss, logits, labels, lse, dlogits)
    return dlogits


define("cross_entropy_forward(Tensor logits, Tensor labels, str options) -> (Tensor, Tensor)", _loss_forward,
       lambda logits, labels, options: (logits.new_empty(logits.shape[0], dtype=torch.float32),
                                        logits.new_empty(logits.shape[0], dtype=torch.float32)))
define("cross_entropy_backward(Tensor dloss, Tensor logits, Tensor labels, Tensor lse, str options) -> Tensor", _loss_backward,
       lambda dloss, logits, labels, lse, options: torch.empty_like(logits))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, options: PointwiseOptions):
        key = options.key()
        loss, lse = torch.ops.te_plugin.cross_entropy_forward(logits, labels, key)
        ctx.save_for_backward(logits, labels, lse)
        ctx.key = key
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx, dloss):
        return torch.ops.te_plugin.cross_entropy_backward(dloss.contiguous(), *ctx.saved_tensors, ctx.key), None, None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *, kernel: str = "auto", fallback: str = "error"):
    """Per-token loss in nats, FP32[...]: logits[...,V], labels[...] integers, -100 gives loss and gradient 0."""
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} differ in their leading dimensions")
    if labels.dtype.is_floating_point or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}; they must be integers, the token of each row")
    check_device("cross_entropy", "labels", labels, logits.device)
    if labels.dtype == torch.int64:
        labels = labels.clamp(-(2**31), 2**31 - 1)  # so that a label far outside the vocabulary does not wrap into it
    flat = labels.reshape(-1).to(torch.int32)
    options = PointwiseOptions(kernel=kernel, fallback=fallback)
    return _CrossEntropy.apply(_rows(logits), flat, options).view(labels.shape)
