"""QKV split + rotary embedding for torch, with BF16 output (and gradient) or FP8 output.

Legend: T tokens, H query heads, G kv heads, D head dim. The plan says whether one kernel does it, or the kernels of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_plugin.ops.checks import check_flags
from te_plugin.ops.qkv_rope.problem import QkvRopeProblem
from te_plugin.ops.qkv_rope_quantize.problem import QkvRopeQuantizeProblem
from te_plugin.plan import Plan, plan, remember_unmeasured
from te_plugin.torch import launches
from te_plugin.torch.call import (
    TORCH_DTYPE,
    addressable,
    check_device,
    define,
    dtype_name,
    empty,
    first_derivative_only,
    launch,
    target_of,
)
from te_plugin.torch.options import Options
from te_plugin.torch.options import options as options_of
from te_plugin.torch.pointwise import PointwiseOptions, rope_impl, rotary_positions
from te_plugin.torch.quantize import QuantizeOptions, quantize_impl, readable


@dataclass(frozen=True)
class QkvRopeOptions(Options):
    """The non-tensor arguments of qkv_rope."""

    heads: int
    kv_heads: int
    layout: str = "split"
    kernel: str = "auto"
    fallback: str = "error"

    def problem(self, tokens: int, head_dim: int, dtype: str) -> QkvRopeProblem:
        """Of qkv[tokens, (heads + 2*kv_heads) * head_dim]."""
        return QkvRopeProblem(tokens, self.heads, self.kv_heads, head_dim, self.layout, dtype)


@dataclass(frozen=True)
class QkvRopeQuantizeOptions(Options):
    """The non-tensor arguments of qkv_rope_quantize."""

    heads: int
    kv_heads: int
    layout: str = "split"
    format: str = "e4m3"
    pow2_scale: bool = False
    delayed: bool = False
    kernel: str = "auto"
    fallback: str = "error"

    @property
    def op(self) -> QkvRopeOptions:
        return options_of(QkvRopeOptions, self.heads, self.kv_heads, self.layout, "auto", self.fallback)

    def cast(self, transpose: bool) -> QuantizeOptions:
        return options_of(QuantizeOptions, self.format, "tensor", self.pow2_scale, transpose, self.delayed, "auto", self.fallback)


@dataclass(frozen=True)
class QuantizedQkv:
    """q[T,H,D], k[T,G,D], v[T,G,D] and v_t[G,D,T] (v transposed) in FP8: value = data * scale_inv.

    scale_inv: FP32[3], those of q, k and v. stats: FP32[3,2], for each of them the amax (NaN kept) and the number of non-finite
    values.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    v_t: torch.Tensor
    scale_inv: torch.Tensor
    stats: torch.Tensor


@remember_unmeasured
def _plan(tokens: int, head_dim: int, dtype: str, device, key: str) -> Plan:
    o = QkvRopeOptions.from_key(key)
    return plan(o.problem(tokens, head_dim, dtype), target_of(device), o.kernel, o.fallback)


@remember_unmeasured
def _quantize_plan(tokens: int, head_dim: int, dtype: str, device, key: str) -> Plan:
    o = QkvRopeQuantizeOptions.from_key(key)
    problem = QkvRopeQuantizeProblem(o.op.problem(tokens, head_dim, dtype), o.format, o.pow2_scale, o.delayed)
    return plan(problem, target_of(device), o.kernel, o.fallback)


def _shapes(qkv, o) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, k, v."""
    tokens, head_dim = qkv.shape[0], qkv.shape[1] // (o.heads + 2 * o.kv_heads)
    return (tokens, o.heads, head_dim), (tokens, o.kv_heads, head_dim), (tokens, o.kv_heads, head_dim)


def _split(qkv, o: QkvRopeOptions) -> tuple[torch.Tensor, ...]:
    """q, k, v as views of qkv, where their heads lie evenly apart."""
    q_shape, k_shape, v_shape = _shapes(qkv, o)
    if o.layout == "split":
        parts = qkv.unflatten(1, (o.heads + 2 * o.kv_heads, q_shape[2])).split((o.heads, o.kv_heads, o.kv_heads), 1)
    else:
        ratio = o.heads // o.kv_heads
        parts = qkv.unflatten(1, (o.kv_heads, ratio + 2, q_shape[2])).split((ratio, 1, 1), 2)
    return tuple(part.reshape(shape) for part, shape in zip(parts, (q_shape, k_shape, v_shape), strict=True))


def _join(q, k, v, o: QkvRopeOptions) -> torch.Tensor:
    """The inverse of _split."""
    if o.layout == "split":
        return torch.cat([q, k, v], 1).flatten(1)
    by_group = [x.unflatten(1, (o.kv_heads, x.shape[1] // o.kv_heads)) for x in (q, k, v)]
    return torch.cat(by_group, 2).flatten(1)


def _rotate(chosen: Plan, x, positions, inv_freq, inverse: bool, o: QkvRopeOptions) -> torch.Tensor:
    """One of the rotations behind a plan that launches no kernel of its own."""
    kernel = "composite" if chosen.kernel.composite else "auto"
    return rope_impl(x, positions, inv_freq, options_of(PointwiseOptions, 1e-5, inverse, kernel, o.fallback).key())


def _forward(qkv, positions, inv_freq, options: str):
    o = QkvRopeOptions.from_key(options)
    chosen = _plan(qkv.shape[0], 2 * inv_freq.shape[0], dtype_name(qkv), qkv.device, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        q, k, v = _split(qkv, o)
        q, k = (_rotate(chosen, x, positions, inv_freq, False, o) for x in (q, k))
        return q, k, v.clone(memory_format=torch.contiguous_format)
    outputs = tuple(empty(shape, qkv.dtype, qkv.device) for shape in _shapes(qkv, o))
    launch(chosen, "forward", qkv, positions, inv_freq, *outputs, *chosen.attributes)
    return outputs


def _backward(dq, dk, dv, positions, inv_freq, options: str):
    o = QkvRopeOptions.from_key(options)
    tokens, heads, head_dim = dq.shape
    chosen = _plan(tokens, head_dim, dtype_name(dq), dq.device, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "backward")
        dq, dk = (_rotate(chosen, dy, positions, inv_freq, True, o) for dy in (dq, dk))
        return _join(dq, dk, dv, o)
    dqkv = empty((tokens, (heads + 2 * o.kv_heads) * head_dim), dq.dtype, dq.device)
    launch(chosen, "backward", dq, dk, dv, positions, inv_freq, dqkv, *chosen.attributes)
    return dqkv


def _quantize_outputs(qkv, o: QkvRopeQuantizeOptions):
    q_shape, k_shape, v_shape = _shapes(qkv, o)
    shapes = (q_shape, k_shape, v_shape, (*v_shape[1:], v_shape[0]))
    data = (empty(shape, TORCH_DTYPE[o.format], qkv.device) for shape in shapes)
    return *data, *(empty(shape, torch.float32, qkv.device) for shape in ((3,), (3, 2)))


def _quantize(qkv, positions, inv_freq, scale, options: str):
    o = QkvRopeQuantizeOptions.from_key(options)
    chosen = _quantize_plan(qkv.shape[0], 2 * inv_freq.shape[0], dtype_name(qkv), qkv.device, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        return _quantize_separately(qkv, positions, inv_freq, scale, o)
    outputs = _quantize_outputs(qkv, o)
    launch(chosen, "forward", addressable(qkv), positions, inv_freq, scale, *outputs, *chosen.attributes)
    return outputs


def _quantize_separately(qkv, positions, inv_freq, scale, o: QkvRopeQuantizeOptions):
    parts = _forward(qkv, positions, inv_freq, o.op.key())
    made = [quantize_impl(x.flatten(1), None if scale is None else scale[i:i + 1], o.cast(transpose=i == 2).key())
            for i, x in enumerate(parts)]
    data = (codes.view(x.shape) for (codes, *_), x in zip(made, parts, strict=True))
    v = parts[2]
    return (*data, made[2][2].view(*v.shape[1:], v.shape[0]), torch.cat([scale_inv for _, scale_inv, *_ in made]),
            torch.stack([stats for *_, stats in made]))


define("qkv_rope(Tensor qkv, Tensor positions, Tensor inv_freq, str options) -> (Tensor, Tensor, Tensor)", _forward,
       lambda qkv, positions, inv_freq, options: tuple(map(qkv.new_empty, _shapes(qkv, QkvRopeOptions.from_key(options)))))
define("qkv_rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor positions, Tensor inv_freq, str options) -> Tensor", _backward,
       lambda dq, dk, dv, positions, inv_freq, options: dq.new_empty(
           (dq.shape[0], (dq.shape[1] + dk.shape[1] + dv.shape[1]) * dq.shape[2])))
define("qkv_rope_quantize(Tensor qkv, Tensor positions, Tensor inv_freq, Tensor? scale, str options) -> "
       "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _quantize,
       lambda qkv, positions, inv_freq, scale, options: _quantize_outputs(qkv, QkvRopeQuantizeOptions.from_key(options)))


class _QkvRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, positions, inv_freq, options: QkvRopeOptions):
        key = options.key()
        ctx.save_for_backward(positions, inv_freq)
        ctx.key = key
        return torch.ops.te_plugin.qkv_rope(qkv, positions, inv_freq, key)

    @staticmethod
    @first_derivative_only
    def backward(ctx, *grads):
        grads = (dy if dy.stride(-1) == 1 else dy.contiguous() for dy in grads)
        return torch.ops.te_plugin.qkv_rope_backward(*grads, *ctx.saved_tensors, ctx.key), None, None, None


def _checked(name: str, qkv, positions, inv_freq, cu_seqlens, heads: int, kv_heads: int):
    """qkv as the kernels read it, int32 positions; ValueError for shapes that do not fit."""
    if qkv.dim() != 2:
        raise ValueError(f"{name} takes qkv[T, (H + 2G) * D], got {tuple(qkv.shape)}")
    width = qkv.shape[1]
    rows_of = heads + 2 * kv_heads
    if rows_of < 1 or width % rows_of or width // rows_of % 2 or not width:
        raise ValueError(f"{name}: qkv has {width} columns; {heads} heads of q and {kv_heads} each of k and v need a multiple "
                         f"of {2 * rows_of}, an even D for each of {rows_of} heads")
    positions = rotary_positions(name, qkv, width // rows_of, positions, inv_freq, cu_seqlens)
    return readable(qkv), positions


def qkv_rope(qkv: torch.Tensor, positions: torch.Tensor | None = None, *, heads: int, kv_heads: int, inv_freq: torch.Tensor,
             layout: str = "split", cu_seqlens: torch.Tensor | None = None, kernel: str = "auto",
             fallback: str = "error") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv[T, (H+2G)*D] into q[T,H,D], k[T,G,D], v[T,G,D], with q and k rotated: the bytes of `rope` on each of them.

    positions[T] (int32) or cu_seqlens[N+1], inv_freq[D/2] (FP32): as for rope. FP32, BF16 or FP16; rows of qkv may be apart.
    layout: "split" (heads of q, then k, then v) or "grouped" (Megatron: for each kv head its heads of q, then k, then v).
    The gradient of qkv is made in one pass over those of q, k and v.
    Raises ValueError for shapes that do not fit and an unknown layout, PlanError when no kernel can run it.
    """
    qkv, positions = _checked("qkv_rope", qkv, positions, inv_freq, cu_seqlens, heads, kv_heads)
    return _QkvRope.apply(qkv, positions, inv_freq, QkvRopeOptions(int(heads), int(kv_heads), layout, kernel, fallback))


def qkv_rope_quantize(qkv: torch.Tensor, positions: torch.Tensor | None = None, *, heads: int, kv_heads: int,
                      inv_freq: torch.Tensor, layout: str = "split", cu_seqlens: torch.Tensor | None = None,
                      scale: torch.Tensor | None = None, dtype: str = "e4m3", pow2_scale: bool = False, kernel: str = "auto",
                      fallback: str = "error") -> QuantizedQkv:
    """qkv_rope in FP8, with v transposed as well: the operands of FP8 attention, by the rules of numerics.py.

    The bytes are those of qkv_rope followed by `quantize` with one scale a tensor. scale: FP32[3], the scales of q, k and v
    (delayed scaling; one pass); None: from the amax of each (current scaling). dtype: an FP8 format's name.
    Every row counts in the amax, also those in gaps between segments: they must hold finite values of ordinary size.
    No gradient flows through the result. Raises as qkv_rope does, and ValueError for a scale of another shape, for a given scale
    together with pow2_scale, and for an unknown dtype.
    """
    check_flags(pow2_scale=pow2_scale)
    qkv, positions = _checked("qkv_rope_quantize", qkv.detach(), positions, inv_freq, cu_seqlens, heads, kv_heads)
    if scale is not None and (scale.shape != (3,) or scale.dtype != torch.float32):
        raise ValueError(f"qkv_rope_quantize: scale must be FP32[3], those of q, k and v; got {scale.dtype}{list(scale.shape)}")
    if scale is not None and pow2_scale:
        raise ValueError("qkv_rope_quantize: pow2_scale chooses scales, and scale gives them; leave one of them out")
    if scale is not None:
        check_device("qkv_rope_quantize", "scale", scale, qkv.device)
    options = options_of(QkvRopeQuantizeOptions, int(heads), int(kv_heads), layout, dtype, pow2_scale, scale is not None,
                         kernel, fallback)
    return QuantizedQkv(*torch.ops.te_plugin.qkv_rope_quantize(qkv, positions, inv_freq, scale, options.key()))
