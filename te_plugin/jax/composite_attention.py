"""Attention over packed segments in JAX's own maths: the whole T x T score matrix of every head.

Legend: T tokens, H query heads, G kv heads, D head dim, N segments (a static capacity).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from te_plugin.plan import Plan


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
    return problem.visible(mask, key[None] - row[:, None])


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
def forward(chosen: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    mask = _visible(chosen, cu_q, cu_k, start_q, start_k, q.shape[0], k.shape[0])
    p, lse, _, _ = _probabilities(chosen, q, k, mask)
    group = chosen.problem.heads // chosen.problem.kv_heads
    v = jnp.repeat(jnp.where(mask.any(0)[:, None, None], v, 0).astype(jnp.float32), group, axis=1)
    return jnp.einsum("hqk,khd->qhd", p, v).astype(q.dtype), lse


@jax.default_matmul_precision("highest")
def backward(chosen: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
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
