"""The grouped GEMM in the place of megablox: equal to ragged_dot, group_offset honoured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin.maxtext.experts import grouped_rows
from te_plugin.maxtext.quantization import DotOptions
from te_plugin.maxtext.seams import install

PLAIN = DotOptions("bf16")
SIZES = [7, 0, 12, 5, 3]


def want(lhs, rhs, sizes, offset):
    """A loop over the experts that are here; rows of other groups are 0."""
    ends = np.cumsum(sizes)
    y = np.zeros((lhs.shape[0], rhs.shape[2]))
    for expert in range(rhs.shape[0]):
        rows = slice(ends[offset + expert] - sizes[offset + expert], ends[offset + expert])
        y[rows] = lhs[rows].astype(np.float64) @ rhs[expert].astype(np.float64)
    return y


def test_all_groups_equal_ragged_dot_forward_and_backward(rng):
    lhs, rhs = rng.standard_normal((32, 24)).astype(np.float32), rng.standard_normal((5, 24, 16)).astype(np.float32)
    sizes, dy = jnp.asarray(SIZES, jnp.int32), rng.standard_normal((32, 16)).astype(np.float32)
    dy[sum(SIZES):] = 0
    y, pull = jax.vjp(lambda a, b: grouped_rows(a, b, sizes, 0, PLAIN), lhs, rhs)
    ragged, ragged_pull = jax.vjp(lambda a, b: jax.lax.ragged_dot(a, b, sizes), lhs, rhs)
    for got, theirs in zip((y, *pull(dy)), (ragged, *ragged_pull(dy)), strict=True):
        np.testing.assert_allclose(got, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_group_offset_takes_the_rows_of_this_shards_experts(offset, traced, rng):
    lhs, rhs = rng.standard_normal((32, 24)).astype(np.float32), rng.standard_normal((2, 24, 16)).astype(np.float32)
    dy = rng.standard_normal((32, 16)).astype(np.float32)
    place = jnp.asarray([offset], jnp.int32) if traced else offset

    @jax.jit
    def run(a, b, dy):
        y, pull = jax.vjp(lambda a, b: grouped_rows(a, b, jnp.asarray(SIZES), place, PLAIN), a, b)
        return y, *pull(dy)

    y, da, db = run(lhs, rhs, dy)
    ends = np.cumsum(SIZES)
    np.testing.assert_allclose(y, want(lhs, rhs, SIZES, offset), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(da, want(dy, rhs.transpose(0, 2, 1), SIZES, offset), rtol=1e-5, atol=1e-5)
    for expert in range(2):
        rows = slice(ends[offset + expert] - SIZES[offset + expert], ends[offset + expert])
        np.testing.assert_allclose(db[expert], lhs[rows].T @ dy[rows], rtol=1e-5, atol=1e-5)


def test_what_the_grouped_gemm_cannot_do_is_refused_by_name(rng):
    from maxtext.kernels import megablox

    install()
    lhs, rhs, sizes = jnp.ones((8, 4)), jnp.ones((2, 4, 4)), jnp.asarray([4, 4])
    with pytest.raises(NotImplementedError, match="transpose_rhs"):
        megablox.gmm(lhs, rhs, sizes, transpose_rhs=True, lhs_quantize_dtype=PLAIN)
