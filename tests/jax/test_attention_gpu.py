"""Packed attention of JAX on a Hopper GPU: cuDNN's kernels, called by XLA, beside framework maths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin.jax import attention, attention_by_segment_ids, launches

from .test_gpu import hopper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper(), reason="JAX sees no Hopper GPU, or sm90 is not built")]
HEADS, KV_HEADS = 4, 2
LISTS = [
    ([0, 300, 450, 700], None),
    ([0, 300, 300, 450, 450, 450], None),
    ([0, 20, 20, 50], [3, 30, 30, 700]),
    ([0, 700], None),
    ([0, 1], None),
    ([0, 40], [600, 700]),
    ([0, 0, 0], None),
]


def draw(seed: int, dim: int = 128, rows: int = 700):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((rows, heads, dim)), jnp.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def gradients(kernel: str, tensors, cu, padded):
    *qkv, dout = tensors
    lists = {"cu_seqlens_q": cu} | ({"cu_seqlens_q_padded": padded} if padded else {})
    lists = {name: jnp.asarray(values, jnp.int32) for name, values in lists.items()}

    @jax.jit
    def run(q, k, v, dout):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, kernel=kernel, fallback="allow", **lists), q, k, v)
        return out, *pull(dout)

    return [np.asarray(x.astype(jnp.float32)) for x in run(*qkv, dout)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("cu,padded", LISTS, ids=str)
def test_every_segment_equals_framework_maths(cu, padded, dim):
    launches.reset()
    got = gradients("auto", draw(1, dim), cu, padded)
    assert {row["kernel"] for row in launches.snapshot()} == {"xla"}
    for one, other in zip(got, gradients("composite", draw(1, dim), cu, padded), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-6, atol=2**-6)


def test_nan_in_the_gaps_meets_no_segment():
    cu, padded = [0, 20, 20, 50], [3, 30, 30, 700]
    inside = np.isin(np.arange(700), [*range(3, 23), *range(30, 60)])
    dirty = [jnp.where(inside[:, None, None], x, jnp.nan) for x in draw(2)]
    for one, other in zip(gradients("xla", dirty, cu, padded), gradients("xla", draw(2), cu, padded), strict=True):
        assert not one[~inside].any()
        np.testing.assert_allclose(one, other, rtol=0, atol=2**-8)


@pytest.mark.parametrize("cu,padded", [([0, 30, 710], None), ([0, 30, 20], None), ([0, 9, 5], [-9, 3, 64])], ids=str)
def test_lists_that_lie_give_nan(cu, padded):
    for tensor in gradients("xla", draw(3), cu, padded):
        assert np.isnan(tensor).all()


def test_rows_of_a_batch_by_segment_ids_under_remat():
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 256, heads, 64)), jnp.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    ids = np.zeros((2, 256), np.int32)
    ids[0, :100], ids[0, 100:250], ids[1, :7] = 1, 2, 1

    def loss(kernel, q, k, v):
        run = jax.checkpoint(lambda *x: attention_by_segment_ids(*x, ids, max_segments=8, kernel=kernel, fallback="allow"))
        return (run(q, k, v).astype(jnp.float32) ** 2).sum()

    got, want = (jax.jit(jax.grad(lambda *x, name=name: loss(name, *x), (0, 1, 2)))(q, k, v) for name in ("xla", "composite"))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2**-5, atol=2**-5)
