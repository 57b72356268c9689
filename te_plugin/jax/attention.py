"""Attention over packed segments for JAX, on the same compiled kernels, problems and plans as torch.

Legend: T tokens, H query heads, G kv heads, D head dim, N segments (a static capacity), B rows of a batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from te_plugin.jax import composite_attention, launches, xla_attention
from te_plugin.jax.call import dtype_name, launch, shape_of, target_of_backend
from te_plugin.jax.checks import check_integers
from te_plugin.jax.sharding import operands_of_call
from te_plugin.ops.attention.cudnn import rows_one_by_one
from te_plugin.ops.attention.problem import AttentionProblem, checked_window
from te_plugin.ops.checks import check_flags
from te_plugin.plan import Plan, plan

# Kernels without a library of ours: a module each, with the forward and backward of the contract of the planned kernels.
IN_JAX = {"xla": xla_attention, "composite": composite_attention}


@dataclass(frozen=True)
class AttentionOptions:
    """The non-array arguments of an attention call."""

    mask: str = "causal"
    window: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    precision: str = "bf16"
    dq_accumulation: str = "fp32"
    deterministic: bool = False
    gaps: bool = False
    kernel: str = "auto"
    fallback: str = "error"

    @classmethod
    def of(cls, *, window=None, softmax_scale=None, **options) -> AttentionOptions:
        """From the arguments of `attention`."""
        scale = None if softmax_scale is None else float(softmax_scale)
        return cls(window=checked_window(window, softmax_scale), softmax_scale=scale, **options)


def _problem(q, k, cu_q, o: AttentionOptions) -> AttentionProblem:
    return AttentionProblem(
        tokens_q=q.shape[0],
        tokens_kv=k.shape[0],
        segments=cu_q.shape[0] - 1,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        dtype=dtype_name(q),
        mask=o.mask,
        window=o.window,
        softmax_scale=o.softmax_scale,
        precision=o.precision,
        needs_backward=True,
        deterministic=o.deterministic,
        dq_accumulation=o.dq_accumulation,
        gaps=o.gaps,
    )


def _plan(q, k, cu_q, o: AttentionOptions) -> Plan:
    return plan(_problem(q, k, cu_q, o), target_of_backend(), o.kernel, o.fallback)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attention(q, k, v, cu_q, cu_k, start_q, start_k, options: AttentionOptions):
    return _forward(q, k, v, cu_q, cu_k, start_q, start_k, options)[0]


def _forward(q, k, v, cu_q, cu_k, start_q, start_k, options: AttentionOptions):
    chosen = _plan(q, k, cu_q, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        out, lse = IN_JAX[chosen.kernel.name].forward(chosen, q, k, v, cu_q, cu_k, start_q, start_k)
    else:
        outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype), shape_of((q.shape[1], q.shape[0]), "fp32")]
        out, lse = launch(chosen, "forward", outputs, [q, k, v, cu_q, cu_k, start_q, start_k], chosen.attributes[:4])
    return (out, lse), (q, k, v, out, lse, cu_q, cu_k, start_q, start_k)


def _backward(options: AttentionOptions, saved, cotangents):
    q, k, v, out, lse, cu_q, cu_k, start_q, start_k = saved
    dout, _ = cotangents
    chosen = _plan(q, k, cu_q, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "backward")
        grads = IN_JAX[chosen.kernel.name].backward(chosen, dout, *saved)
    else:
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
        grads = launch(chosen, "backward", outputs, [dout, *saved], chosen.attributes)
    return (*grads, None, None, None, None)


_attention.defvjp(_forward, _backward)


def attention(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_kv=None,
    cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None,
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
    """softmax(scale * Q K^T + mask) V for every packed segment on its own; the twin of te_plugin.torch.attention.

    q[Tq,H,D], k[Tk,G,D], v[Tk,G,D]; cu_seqlens_*: int32[N+1], a static capacity whose unused entries repeat the last one.
    Differentiable in q, k and v under jit, grad and remat. Raises ValueError for bad shapes or dtypes, PlanError when no
    kernel can run it; cu_seqlens that reach outside the arrays raise when the computation runs.
    """
    if q.ndim != 3 or k.ndim != 3 or v.shape != k.shape or q.shape[2] != k.shape[2]:
        raise ValueError(f"attention takes q[Tq,H,D], k[Tk,G,D], v[Tk,G,D]; got q{q.shape}, k{k.shape}, v{v.shape}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    cu_q = cu_seqlens_q
    cu_k = cu_q if cu_seqlens_kv is None else cu_seqlens_kv
    start_q = cu_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    start_k = (
        start_q
        if cu_seqlens_kv is None and cu_seqlens_kv_padded is None
        else (cu_k if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded)
    )
    for name, x in (
        ("cu_seqlens_q", cu_q),
        ("cu_seqlens_kv", cu_k),
        ("cu_seqlens_q_padded", start_q),
        ("cu_seqlens_kv_padded", start_k),
    ):
        if not hasattr(x, "dtype") or x.ndim != 1 or not x.shape[0]:
            raise ValueError(f"{name} must be int32[N+1], the first entry 0; got {x!r}")
        if x.dtype != jnp.int32 or x.shape != cu_q.shape:
            raise ValueError(f"{name} must be int32[{cu_q.shape[0]}], got {x.dtype}{list(x.shape)}")
    check_flags(deterministic=deterministic, return_lse=return_lse)
    options = AttentionOptions.of(
        mask=mask,
        window=window,
        softmax_scale=softmax_scale,
        precision=precision,
        dq_accumulation=dq_accumulation,
        deterministic=deterministic,
        gaps=cu_seqlens_q_padded is not None or cu_seqlens_kv_padded is not None,
        kernel=kernel,
        fallback=fallback,
    )
    out, lse = _attention(*operands_of_call(q, k, v, cu_q, cu_k, start_q, start_k), options)
    return (out, jax.lax.stop_gradient(lse)) if return_lse else out


def cu_seqlens_from_segment_ids(segment_ids, max_segments: int):
    """(cu_seqlens, cu_seqlens_padded), int32[B*max_segments + 1] each, from ids[B,T]: 0 is padding, equal neighbours one segment.

    A row with more than max_segments segments gives lists that every kernel refuses (a negative start), so that nothing is
    computed with some of them missing. Runs on the device; shapes are static.
    """
    check_integers("segment_ids", segment_ids)
    if not isinstance(max_segments, int | np.integer) or max_segments < 1:
        raise ValueError(f"max_segments={max_segments!r} must be the most segments a row may hold, at least 1")
    rows, tokens = segment_ids.shape
    before = jnp.concatenate([jnp.zeros((rows, 1), segment_ids.dtype), segment_ids[:, :-1]], axis=1)
    first = (segment_ids != before) & (segment_ids != 0)
    inside = segment_ids != 0
    index = jnp.cumsum(first, axis=1, dtype=jnp.int32) - 1
    capacity = rows * max_segments
    slot = jnp.where(
        inside & (index < max_segments), index + jnp.arange(rows, dtype=jnp.int32)[:, None] * max_segments, capacity
    )
    lengths = jnp.zeros(capacity + 1, jnp.int32).at[slot.reshape(-1)].add(1)[:capacity]
    flat = jnp.arange(rows * tokens, dtype=jnp.int32).reshape(rows, tokens)
    # An unused slot starts where its row ends, so that starts never decrease.
    row_end = jnp.repeat(jnp.arange(1, rows + 1, dtype=jnp.int32) * tokens, max_segments, total_repeat_length=capacity)
    starts = jnp.append(row_end, rows * tokens).at[slot.reshape(-1)].min(flat.reshape(-1))[:capacity]
    cu = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
    overflow = jnp.any(inside & (index >= max_segments))
    padded = jnp.concatenate([starts, jnp.full(1, rows * tokens, jnp.int32)])
    return cu, jnp.where(overflow, jnp.int32(-1), padded)


def attention_by_segment_ids(q, k, v, segment_ids, *, max_segments: int, **options):
    """Attention over rows of a batch packed by segment ids: q[B,T,H,D], k and v[B,T,G,D], segment_ids[B,T] (0: padding).

    max_segments: static capacity a row. options: as in `attention`, but for return_lse. Returns out[B,T,H,D]; padding rows are 0.
    Where XLA calls cuDNN, rows of the batch run one after the other: its scratch has a slot for each segment, as long as all rows
    of a call.
    """
    for name, shape in (("segment_ids", segment_ids.shape), ("k", k.shape[:2]), ("v", v.shape[:2])):
        if shape != q.shape[:2]:
            raise ValueError(
                f"{name} has {shape} rows and tokens, q has {q.shape[:2]}: every token has one id, one key and one value"
            )
    cu, padded = cu_seqlens_from_segment_ids(segment_ids, max_segments)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    asked = AttentionOptions.of(gaps=True, **options)
    problem = _problem(*flat[:2], cu, asked)
    if len(segment_ids) > 1 and rows_one_by_one(problem, target_of_backend(), asked.kernel, asked.fallback):
        alone = lambda row: attention_by_segment_ids(*(x[None] for x in row), max_segments=max_segments, **options)[0]  # noqa: E731
        return jax.lax.map(alone, (q, k, v, segment_ids))
    out = attention(*flat, cu_seqlens_q=cu, cu_seqlens_q_padded=padded, **options)
    return out.reshape(q.shape)
