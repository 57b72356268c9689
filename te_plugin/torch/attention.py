"""Attention over packed segments for torch: one public function, one forward and one backward op.

Legend: T tokens, H query heads, G kv heads, D head dim, N segments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from te_plugin.ops.attention.problem import AttentionProblem, checked_window
from te_plugin.ops.checks import check_flags
from te_plugin.plan import Plan, plan, remember_unmeasured
from te_plugin.torch import fp8_attention, framework_attention, launches
from te_plugin.torch.call import (
    autocast,
    check_int32,
    define,
    dtype_name,
    empty,
    first_derivative_only,
    is_direct,
    launch,
    scratch,
    target_of,
)
from te_plugin.torch.options import Options


@dataclass(frozen=True)
class AttentionOptions(Options):
    """The non-tensor arguments of an attention call. softmax_scale 0.0 stands for 1/sqrt(D)."""

    mask: str = "causal"
    left: int = -1
    right: int = -1
    softmax_scale: float = 0.0
    precision: str = "bf16"
    dq_accumulation: str = "fp32"
    deterministic: bool = False
    gaps: bool = False
    needs_backward: bool = False
    kernel: str = "auto"
    fallback: str = "error"


@remember_unmeasured
def _plan(tokens_q, tokens_kv, segments, heads, kv_heads, head_dim, dtype, device, key) -> Plan:
    o = AttentionOptions.from_key(key)
    problem = AttentionProblem(
        tokens_q=tokens_q, tokens_kv=tokens_kv, segments=segments, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        dtype=dtype, mask=o.mask, window=(o.left, o.right), softmax_scale=o.softmax_scale or None, precision=o.precision,
        needs_backward=o.needs_backward, deterministic=o.deterministic, dq_accumulation=o.dq_accumulation, gaps=o.gaps)
    return plan(problem, target_of(device), o.kernel, o.fallback)


def plan_of(q, k, cu_q, key: str) -> Plan:
    """The plan of a call; forward and backward ask with the same key and so get the same object."""
    tokens, heads, dim = q.shape
    tokens_kv, kv_heads, _ = k.shape
    return _plan(tokens, tokens_kv, cu_q.shape[0] - 1, heads, kv_heads, dim, dtype_name(q), q.device, key)


def _forward(q, k, v, cu_q, cu_k, start_q, start_k, options):
    return run_forward(plan_of(q, k, cu_q, options), q, k, v, cu_q, cu_k, start_q, start_k)


def run_forward(chosen: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    """out[Tq,H,D], lse[H,Tq] by a given plan."""
    if chosen.problem.precision == "fp8":
        return fp8_attention.forward(chosen, q, k, v, cu_q, cu_k, start_q, start_k)
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        return framework_attention.FORWARD[chosen.kernel.name](chosen, q, k, v, cu_q, cu_k, start_q, start_k)
    shape, device = q.shape, q.device
    out, lse = empty(shape, q.dtype, device), empty((shape[1], shape[0]), torch.float32, device)
    buffers = scratch(chosen, "forward", device) if chosen.buffers else ()
    launch(chosen, "forward", q, k, v, cu_q, cu_k, start_q, start_k, out, lse, *buffers, *chosen.attributes[:4])
    return out, lse


def _forward_fake(q, k, v, cu_q, cu_k, start_q, start_k, options):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _backward(dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k, options):
    return run_backward(plan_of(q, k, cu_q, options), dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k)


def run_backward(chosen: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
    """dq, dk, dv by a given plan; scratch is what the plan says."""
    if chosen.problem.precision == "fp8":
        return fp8_attention.backward(chosen, _innermost_contiguous(dout), q, k, v, out, lse, cu_q, cu_k, start_q, start_k)
    if chosen.kernel.library is None:
        launches.record(chosen, "backward")
        return framework_attention.BACKWARD[chosen.kernel.name](chosen, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k)
    dq, dk, dv = (empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    launch(chosen, "backward", _innermost_contiguous(dout), q, k, v, out, lse, cu_q, cu_k, start_q, start_k, dq, dk, dv,
           *scratch(chosen, "backward", q.device), *chosen.attributes)
    return dq, dk, dv


def _backward_fake(dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k, options):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_OPERANDS = "Tensor q, Tensor k, Tensor v"
_SEGMENTS = "Tensor cu_q, Tensor cu_k, Tensor start_q, Tensor start_k, str options"
define(f"attention_forward({_OPERANDS}, {_SEGMENTS}) -> (Tensor, Tensor)", _forward, _forward_fake)
define(f"attention_backward(Tensor dout, {_OPERANDS}, Tensor out, Tensor lse, {_SEGMENTS}) -> (Tensor, Tensor, Tensor)",
       _backward, _backward_fake)
_forward_op = torch.ops.te_plugin.attention_forward.default
_backward_op = torch.ops.te_plugin.attention_backward.default


def _spelled(*values) -> str:
    return AttentionOptions(*values).key()


_key = functools.lru_cache(maxsize=4096, typed=True)(_spelled)  # typed: 1 and True are equal but not spelled alike


class _Attention(torch.autograd.Function):
    """direct: without the dispatcher, and with `out` alone as output (each output costs a microsecond)."""

    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, start_q, start_k, key: str, direct: bool):
        out, lse = (_forward if direct else _forward_op)(q, k, v, cu_q, cu_k, start_q, start_k, key)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, start_q, start_k)
        ctx.key = key
        return out if direct else (out, lse)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, _dlse=None):
        grads = (_backward if is_direct(dout) else _backward_op)(dout, *ctx.saved_tensors, ctx.key)
        return (*grads, None, None, None, None, None, None)


def _innermost_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    mask: str = "causal",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    precision: str = "bf16",
    dq_accumulation: str = "fp32",
    deterministic: bool = False,
    kernel: str = "auto",
    fallback: str = "error",
    return_lse: bool = False,
):
    """softmax(scale * Q K^T + mask) V for every packed segment on its own.

    q[Tq,H,D], k[Tk,G,D], v[Tk,G,D] in FP32, BF16 or FP16; H a multiple of G, head h uses kv head h // (H/G).
    cu_seqlens_*: int32[N+1] on the same device, cumulative real lengths; *_padded: start row of each segment, in order, where
    memory has gaps. Rows outside every segment give output and gradient 0 and are never read.
    mask: "causal" (equal lengths per segment), "causal_top_left", "causal_bottom_right", "none".
    window: (left, right) keys beside the row's own position; None or -1 means no limit.
    precision: "bf16" computes in the tensors' dtype (or autocast's) with FP32 statistics, "fp8" quantises all operands.
    Returns out[Tq,H,D]; with return_lse also the log-sum-exp [H,Tq] in FP32 (no gradient flows through it).
    Raises ValueError for bad shapes, dtypes or cu_seqlens; PlanError when no kernel can run it.
    """
    q, k, v = autocast(q, k, v)
    q_shape, k_shape, device = q.shape, k.shape, q.device
    if len(q_shape) != 3 or len(k_shape) != 3 or v.shape != k_shape or q_shape[2] != k_shape[2]:
        raise ValueError(f"attention takes q[Tq,H,D], k[Tk,G,D], v[Tk,G,D]; got q{tuple(q.shape)}, k{tuple(k.shape)}, "
                         f"v{tuple(v.shape)}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device}, {v.device}")
    cu_q = cu_seqlens_q
    cu_k = cu_q if cu_seqlens_kv is None else cu_seqlens_kv
    start_q = cu_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    start_k = start_q if cu_seqlens_kv is None and cu_seqlens_kv_padded is None else (
        cu_k if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded)
    check_int32("cu_seqlens_q", cu_q, device)
    entries = cu_q.shape[0]
    for name, tensor in (("cu_seqlens_kv", cu_k), ("cu_seqlens_q_padded", start_q), ("cu_seqlens_kv_padded", start_k)):
        if tensor is cu_q:
            continue
        check_int32(name, tensor, device)
        if tensor.shape[0] != entries:
            raise ValueError(f"{name} has {tensor.shape[0]} entries, cu_seqlens_q has {entries}")
    if entries < 1:
        raise ValueError("cu_seqlens_q is empty; it holds N+1 entries, the first is 0")
    check_flags(deterministic=deterministic, return_lse=return_lse)
    left, right = checked_window(window, softmax_scale)
    needs_backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    direct = is_direct(q)
    key = (_key if direct else _spelled)(
        mask, left, right,
        0.0 if softmax_scale is None else float(softmax_scale), precision, dq_accumulation, deterministic,
        cu_seqlens_q_padded is not None or cu_seqlens_kv_padded is not None, needs_backward, kernel, fallback)
    q, k, v = _innermost_contiguous(q), _innermost_contiguous(k), _innermost_contiguous(v)
    if needs_backward and direct and not return_lse:
        return _Attention.apply(q, k, v, cu_q, cu_k, start_q, start_k, key, True)
    if needs_backward:
        if torch.compiler.is_compiling():
            # A traced autograd function gives a tensor that is passed twice the gradient of one place only.
            k = k.view_as(k) if k is q else k
            v = v.view_as(v) if v is q or v is k else v
        out, lse = _Attention.apply(q, k, v, cu_q, cu_k, start_q, start_k, key, False)
    else:
        out, lse = (_forward if direct else _forward_op)(q, k, v, cu_q, cu_k, start_q, start_k, key)
    return (out, lse.detach()) if return_lse else out
