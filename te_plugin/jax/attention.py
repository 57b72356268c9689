"""Attention over packed segments for JAX, on the same compiled kernels, problems and plans as torch.

Legend: T tokens, H query heads, G kv heads, D head dim, N segments (a static capacity), B rows of a batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from te_plugin.jax import launches
from te_plugin.jax.call import dtype_name, launch, shape_of, target_of_backend
from te_plugin.jax.checks import check_flags, check_integers
from te_plugin.jax.sharding import operands_of_call
from te_plugin.ops.attention.problem import AttentionProblem, checked_window
from te_plugin.plan import Plan, plan


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


def plan_of(q, k, cu_q, o: AttentionOptions) -> Plan:
    problem = AttentionProblem(
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
    return plan(problem, target_of_backend(), o.kernel, o.fallback)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attention(q, k, v, cu_q, cu_k, start_q, start_k, options: AttentionOptions):
    return _forward(q, k, v, cu_q, cu_k, start_q, start_k, options)[0]


def _forward(q, k, v, cu_q, cu_k, start_q, start_k, options: AttentionOptions):
    chosen = plan_of(q, k, cu_q, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        out, lse = _composite_forward(chosen, q, k, v, cu_q, cu_k, start_q, start_k)
    else:
        outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype), shape_of((q.shape[1], q.shape[0]), "fp32")]
        out, lse = launch(chosen, "forward", outputs, [q, k, v, cu_q, cu_k, start_q, start_k], chosen.attributes[:4])
    return (out, lse), (q, k, v, out, lse, cu_q, cu_k, start_q, start_k)


def _backward(options: AttentionOptions, saved, cotangents):
    q, k, v, out, lse, cu_q, cu_k, start_q, start_k = saved
    dout, _ = cotangents
    chosen = plan_of(q, k, cu_q, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "backward")
        grads = _composite_backward(chosen, dout, *saved)
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
    check_flags(deterministic=deterministic, return_lse=return_lse)
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
    options = AttentionOptions(
        mask,
        checked_window(window, softmax_scale),
        None if softmax_scale is None else float(softmax_scale),
        precision,
        dq_accumulation,
        deterministic,
        cu_seqlens_q_padded is not None or cu_seqlens_kv_padded is not None,
        kernel,
        fallback,
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

    max_segments: static capacity a row. options: as in `attention`. Returns out[B,T,H,D]; padding rows are 0.
    """
    for name, shape in (("segment_ids", segment_ids.shape), ("k", k.shape[:2]), ("v", v.shape[:2])):
        if shape != q.shape[:2]:
            raise ValueError(
                f"{name} has {shape} rows and tokens, q has {q.shape[:2]}: every token has one id, one key and one value"
            )
    cu, padded = cu_seqlens_from_segment_ids(segment_ids, max_segments)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out = attention(*flat, cu_seqlens_q=cu, cu_seqlens_q_padded=padded, **options)
    return out.reshape(q.shape)


def _visible(chosen: Plan, cu_q, cu_k, start_q, start_k, tokens_q: int, tokens_kv: int):
    def ids(cu, start, tokens):
        rows = jnp.arange(tokens, dtype=jnp.int32)[:, None]
        inside = (rows >= start[None, :-1]) & (rows < (start[:-1] + cu[1:] - cu[:-1])[None])
        segment = jnp.where(inside.any(1), jnp.argmax(inside, 1), -1)
        return segment, rows[:, 0] - start[jnp.maximum(segment, 0)]

    problem = chosen.problem
    seg_q, row = ids(cu_q, start_q, tokens_q)
    seg_k, key = ids(cu_k, start_k, tokens_kv)
    if problem.mask == "causal_bottom_right":
        row = row + ((cu_k[1:] - cu_k[:-1]) - (cu_q[1:] - cu_q[:-1]))[jnp.maximum(seg_q, 0)]
    mask = (seg_q[:, None] == seg_k[None]) & (seg_q[:, None] >= 0)
    delta = key[None] - row[:, None]
    left, right = problem.window
    if problem.mask != "none":
        mask &= delta <= 0
    if left >= 0:
        mask &= delta >= -left
    if right >= 0:
        mask &= delta <= right
    return mask


def _probabilities(chosen: Plan, q, k, mask, lse=None):
    group = chosen.problem.heads // chosen.problem.kv_heads
    k = jnp.repeat(jnp.where(mask.any(0)[:, None, None], k, 0).astype(jnp.float32), group, axis=1)
    q = jnp.where(mask.any(1)[:, None, None], q, 0).astype(jnp.float32)
    scores = jnp.where(mask, jnp.einsum("qhd,khd->hqk", q, k) * chosen.problem.scale, -jnp.inf)
    if lse is None:
        top = jnp.max(scores, -1, initial=-jnp.inf)  # with no key at all there is nothing to take the maximum of
        safe = jnp.where(jnp.isfinite(top), top, 0.0)
        lse = jnp.where(jnp.isfinite(top), safe + jnp.log(jnp.sum(jnp.exp(scores - safe[..., None]), -1)), -jnp.inf)
    return jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), lse, q, k


@jax.default_matmul_precision("highest")  # not TF32, which is XLA's default on a GPU
def _composite_forward(chosen: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    mask = _visible(chosen, cu_q, cu_k, start_q, start_k, q.shape[0], k.shape[0])
    p, lse, _, _ = _probabilities(chosen, q, k, mask)
    group = chosen.problem.heads // chosen.problem.kv_heads
    v = jnp.repeat(jnp.where(mask.any(0)[:, None, None], v, 0).astype(jnp.float32), group, axis=1)
    return jnp.einsum("hqk,khd->qhd", p, v).astype(q.dtype), lse


@jax.default_matmul_precision("highest")
def _composite_backward(chosen: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
    problem = chosen.problem
    group = problem.heads // problem.kv_heads
    mask = _visible(chosen, cu_q, cu_k, start_q, start_k, q.shape[0], k.shape[0])
    p, _, q32, k32 = _probabilities(chosen, q, k, mask, lse)
    rows, keys = mask.any(1)[:, None, None], mask.any(0)[:, None, None]
    v32 = jnp.repeat(jnp.where(keys, v, 0).astype(jnp.float32), group, axis=1)
    dout, out = (jnp.where(rows, x, 0).astype(jnp.float32) for x in (dout, out))
    ds = p * (jnp.einsum("qhd,khd->hqk", dout, v32) - (dout * out).sum(-1).T[..., None])
    fold = lambda x: x.reshape(x.shape[0], problem.kv_heads, group, problem.head_dim).sum(2)
    dq = jnp.einsum("hqk,khd->qhd", ds, k32) * problem.scale
    dk = fold(jnp.einsum("hqk,qhd->khd", ds, q32)) * problem.scale
    dv = fold(jnp.einsum("hqk,qhd->khd", p, dout))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
