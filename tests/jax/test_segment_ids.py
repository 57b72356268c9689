"""Attention over rows packed by segment ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin import oracle
from te_plugin.jax import attention_by_segment_ids, cu_seqlens_from_segment_ids


def rows_of(*rows):
    return jnp.asarray(rows, jnp.int32)


def test_lists_of_a_batch_of_packed_rows():
    cu, padded = cu_seqlens_from_segment_ids(rows_of([1, 1, 1, 2, 2, 0, 0, 0], [5, 5, 6, 6, 6, 6, 9, 9]), max_segments=3)
    assert cu.tolist() == [0, 3, 5, 5, 7, 11, 13]
    assert padded.tolist() == [0, 3, 8, 8, 10, 14, 16]


@pytest.mark.report("NVIDIA/TransformerEngine#2523")
def test_positions_restart_with_every_segment_id():
    """ids [1,1,1,2,2,0,0,0]: rows 3 and 4 are positions 0 and 1 of their own segment, so a causal mask starts anew there."""
    ids = rows_of([1, 1, 1, 2, 2, 0, 0, 0])
    q = k = jnp.zeros((1, 8, 1, 16), jnp.float32)
    v = jnp.broadcast_to(jnp.arange(8, dtype=jnp.float32)[None, :, None, None], q.shape)
    out = attention_by_segment_ids(q, k, v, ids, max_segments=2)[0, :, 0, 0]
    np.testing.assert_allclose(out, [0, 0.5, 1, 3, 3.5, 0, 0, 0], atol=1e-6)


@pytest.mark.report("AI-Hypercomputer/maxtext#4476")
def test_a_segment_never_sees_the_one_before_it():
    """Segments [3, 2], Q = K = 0, V = 1 on the first segment: rows 3 and 4 are exactly 0 (a leak gives 0.75 and 0.6)."""
    ids = rows_of([1, 1, 1, 2, 2])
    q = k = jnp.zeros((1, 5, 2, 16), jnp.float32)
    v = jnp.where(ids == 1, 1.0, 0.0)[..., None, None] * jnp.ones((1, 5, 2, 16))
    for kernel in ("cpu", "composite"):
        out = attention_by_segment_ids(q, k, v, ids, max_segments=2, kernel=kernel)
        assert (np.asarray(out)[0, 3:] == 0).all(), kernel
        np.testing.assert_allclose(np.asarray(out)[0, :3], 1, atol=1e-6, err_msg=kernel)


def test_outputs_and_gradients_equal_the_oracle_under_jit_and_remat(rng):
    ids = rows_of([1] * 20 + [2] * 9 + [0] * 3, [1] * 5 + [2] * 27)
    q, k, v, dout = (rng.standard_normal((2, 32, heads, 16)).astype(np.float32) for heads in (4, 2, 2, 4))

    @jax.jit
    def run(q, k, v, dout):
        attend = jax.checkpoint(lambda q, k, v: attention_by_segment_ids(q, k, v, ids, max_segments=4))
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    got = run(q, k, v, dout)
    flat = [x.reshape(-1, *x.shape[2:]).astype(np.float64) for x in (q, k, v, dout)]
    cu, padded = (np.asarray(x) for x in cu_seqlens_from_segment_ids(ids, 4))
    places = (cu, cu, padded, padded)
    want = (oracle.attention_forward(*flat[:3], *places)[0], *oracle.attention_backward(flat[3], *flat[:3], *places))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a).reshape(b.shape), b, rtol=2e-5, atol=2e-5, err_msg=name)


def test_more_segments_than_the_capacity_is_an_error_not_a_wrong_result():
    ids = rows_of([1, 2, 3, 4])
    q = jnp.ones((1, 4, 1, 16), jnp.float32)
    with pytest.raises(Exception, match="start|segment|cu_seqlens"):
        jax.block_until_ready(attention_by_segment_ids(q, q, q, ids, max_segments=3))


def test_shapes_that_do_not_belong_together_are_refused():
    q = jnp.ones((1, 4, 1, 16), jnp.float32)
    with pytest.raises(ValueError, match="segment_ids"):
        attention_by_segment_ids(q, q, q, rows_of([1, 1]), max_segments=1)
    ids = rows_of([1, 1, 2, 2])
    two = jnp.ones((2, 4, 1, 16), jnp.float32)
    with pytest.raises(ValueError, match=r"k has \(2, 4\) rows and tokens"):  # the second row's keys went unseen
        attention_by_segment_ids(q, two, two, ids, max_segments=2)
    with pytest.raises(ValueError, match="segment_ids must be integers, got float32"):
        attention_by_segment_ids(q, q, q, ids.astype(jnp.float32), max_segments=2)
    with pytest.raises(ValueError, match="max_segments=0 must be"):
        attention_by_segment_ids(q, q, q, ids, max_segments=0)
