"""cuDNN's packed attention (BF16, FP16) as XLA calls it.

JAX has primitives for cuDNN's ragged layout, but its public dot_product_attention passes no offsets of segments; so they are
called by their names inside JAX, which the plan has looked for (absent_in_jax). A segment is one entry of cuDNN's batch. cuDNN
neither reads nor writes rows outside segments; they are zeroed here. Lists that reach outside the arrays are run as empty
segments and make the output and every gradient NaN, as te_plugin.torch.cudnn_attention does.

Legend: T tokens, H query heads, G kv heads, D head dim, N segments (a static capacity).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from te_plugin.ops.attention.cudnn import JAX_BACKWARD, JAX_FORWARD, JAX_MODULE, slots
from te_plugin.plan import Plan


@dataclass(frozen=True)
class _Side:
    """The segments of q, or of k and v, among their T rows."""

    lengths: jax.Array  # [N], 0 where the lists are not valid
    starts: jax.Array  # [N]
    inside: jax.Array  # [T]: rows that a segment holds
    segment: jax.Array  # [T]: the segment of a row, 0 outside
    place: jax.Array  # [T]: the row within its segment, 0 outside

    @classmethod
    def make(cls, cu, start, rows: int, valid) -> _Side:
        lengths = jnp.where(valid, jnp.diff(cu), 0)
        starts = jnp.where(valid, start[:-1], 0)
        row = jnp.arange(rows, dtype=jnp.int32)
        # Starts never decrease, and the last segment that begins at a row is the one that can hold it: those before it are empty.
        segment = jnp.maximum(jnp.searchsorted(starts, row, side="right") - 1, 0)
        place = row - starts[segment]
        inside = (place >= 0) & (place < lengths[segment])
        return cls(lengths, starts, inside, jnp.where(inside, segment, 0), jnp.where(inside, place, 0))

    def as_cudnn(self) -> tuple[jax.Array, jax.Array]:
        """Lengths [1,M] and offsets [1,M+1] in rows, M = slots(N)."""
        more = slots(self.lengths.size) - self.lengths.size
        lengths = jnp.concatenate([self.lengths, jnp.zeros(more, jnp.int32)])
        return lengths[None], jnp.concatenate([self.starts, jnp.full(more + 1, self.inside.size, jnp.int32)])[None]

    def fill(self, x, valid):
        """x[T,...] with zero, or NaN for lists that are not valid, in the rows that no segment holds."""
        outside = jnp.where(valid, 0, jnp.nan).astype(x.dtype)
        return jnp.where(self.inside[:, None, None], x, outside)


def _sides(q, k, cu_q, cu_k, start_q, start_k):
    def fits(cu, start, rows):
        lengths, ends = jnp.diff(cu), start[:-1] + jnp.diff(cu)
        ordered = (start[:-1] >= 0) & (start[:-1] <= start[1:]) & (lengths >= 0) & ((lengths == 0) | (ends <= start[1:]))
        return ordered.all() & (cu[0] == 0) & (start[-1] <= rows)

    valid = fits(cu_q, start_q, q.shape[0]) & fits(cu_k, start_k, k.shape[0]) & (jnp.diff(cu_q) == jnp.diff(cu_k)).all()
    return _Side.make(cu_q, start_q, q.shape[0], valid), _Side.make(cu_k, start_k, k.shape[0], valid), valid


def _call(name: str, plan: Plan, sides: tuple[_Side, _Side], q, k, v, *others, **options):
    """One of JAX's primitives on q[T,H,D], k[T,G,D], v[T,G,D], a batch of one row to it."""
    cudnn = importlib.import_module(JAX_MODULE)
    none = jnp.zeros(0, q.dtype)
    (lengths_q, offsets_q), (lengths_k, offsets_k) = (side.as_cudnn() for side in sides)
    return getattr(cudnn, name).bind(
        q[None], k[None], v[None], none, lengths_q, lengths_k, offsets_q, offsets_k, none, none, *others,
        scale=plan.problem.scale, seed=0, dropout_rate=0.0, variadic_args=(False, False),
        mask_type=cudnn.MaskType.PADDING_CAUSAL, layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=None, **options)


def forward(plan: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    """out[Tq,H,D], lse[H,Tq]: the contract of the planned attention kernels."""
    if not plan.problem.segments or not q.size or not k.size:
        return jnp.zeros_like(q), jnp.full((q.shape[1], q.shape[0]), -jnp.inf, jnp.float32)
    of_q, of_kv, valid = _sides(q, k, cu_q, cu_k, start_q, start_k)
    out, stats = _call(JAX_FORWARD, plan, (of_q, of_kv), q, k, v, is_training=True)
    lse = jnp.where(of_q.inside[:, None], stats[of_q.segment, :, of_q.place], -jnp.inf).T
    return of_q.fill(out[0], valid), lse


def backward(plan: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
    """dq, dk, dv in the inputs' dtype: the contract of the planned attention kernels."""
    if not plan.problem.segments or not q.size or not k.size:
        return tuple(jnp.zeros_like(x) for x in (q, k, v))
    of_q, of_kv, valid = _sides(q, k, cu_q, cu_k, start_q, start_k)
    # cuDNN wants the log-sum-exp as it wrote it, a slot of T rows a segment: [N,H,T]. A row past the end has no probability.
    places = jnp.arange(q.shape[0], dtype=jnp.int32)
    rows = jnp.minimum(of_q.starts[:, None] + places, q.shape[0] - 1)
    stats = jnp.where((places < of_q.lengths[:, None])[:, None], jnp.swapaxes(lse[:, rows], 0, 1), jnp.inf)
    stats = jnp.pad(stats, ((0, slots(len(stats)) - len(stats)), (0, 0), (0, 0)), constant_values=jnp.inf)
    grads = _call(JAX_BACKWARD, plan, (of_q, of_kv), q, k, v, stats, out[None], dout[None])
    return tuple(side.fill(x[0], valid) for side, x in zip((of_q, of_kv, of_kv), grads, strict=True))
