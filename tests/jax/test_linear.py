"""Linear and grouped linear in JAX against the float64 oracle, in every precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin import oracle
from te_plugin.jax import grouped_linear, linear, quantize

PRECISIONS = ("fp32", "fp8_current", "fp8_rowwise", "fp8_block", "mxfp8")


def relative(got, want) -> float:
    got = np.asarray(got, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_forward_dgrad_and_wgrad_equal_the_oracle(precision, layout, rng):
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, 256), (128, 256), (96, 128)))
    weight = w if layout == "nk" else np.ascontiguousarray(w.T)
    y, pull = jax.vjp(lambda x, w: linear(x, w, precision=precision, layout=layout), x, weight)
    dx, dw = pull(jnp.asarray(dy))
    dw = dw if layout == "nk" else dw.T
    assert relative(y, oracle.linear(x, w, precision=precision)) < 1e-5
    assert relative(dx, oracle.linear_dgrad(dy, w, precision)) < 1e-5
    assert relative(dw, oracle.linear_wgrad(dy, x, precision)) < 1e-5


def test_delayed_scaling_carries_amaxes_and_non_finite_counts_out(rng):
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 64), (64, 48), (32, 48)))
    x[3, 5] = np.inf
    scales, stats = jnp.asarray([16.0, 32.0, 64.0]), jnp.zeros((3, 2))
    run = jax.jit(lambda x, w, s, t: linear(x, w, precision="fp8_delayed", layout="kn", scales=s, stats=t))
    _, pull = jax.vjp(run, x, w, scales, stats)
    _, _, amaxes, found = pull(jnp.asarray(dy))
    assert np.isinf(amaxes[0])
    np.testing.assert_allclose(amaxes[1:], [np.abs(w).max(), np.abs(dy).max()])
    assert found[:, 1].tolist() == [1, 0, 0]


def test_arguments_that_mean_nothing_are_refused():
    x, w = jnp.ones((32, 64)), jnp.ones((48, 64))
    with pytest.raises(ValueError, match="scales"):
        linear(x, w, precision="fp8_current", scales=jnp.ones(3))
    with pytest.raises(ValueError, match="pass scales"):
        linear(x, w, precision="fp8_delayed")
    with pytest.raises(ValueError, match="layout='km'"):
        linear(x, w, layout="km")
    with pytest.raises(ValueError, match="in_features=60 .* 16"):
        linear(jnp.ones((32, 60)), jnp.ones((48, 60)), precision="fp8_current")


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
@pytest.mark.parametrize("sizes", [[10, 0, 22, 8], [0, 0, 0, 48], [5, 5, 5, 5]])
def test_grouped_linear_equals_the_oracle(sizes, precision, rng):
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((48, 32), (4, 16, 32), (48, 16)))
    x[sum(sizes):], dy[sum(sizes):] = np.nan, np.nan  # surplus rows never matter
    groups = jnp.asarray(sizes, jnp.int32)
    inside = (np.arange(48) < sum(sizes))[:, None]
    for layout in ("nk", "kn"):
        weight = w if layout == "nk" else np.ascontiguousarray(w.transpose(0, 2, 1))
        y, pull = jax.vjp(lambda x, w: grouped_linear(x, w, groups, precision, layout=layout), x, weight)  # noqa: B023
        dx, dw, *_ = pull(jnp.asarray(dy))
        dw = dw if layout == "nk" else dw.transpose(0, 2, 1)
        clean_x, clean_dy = np.where(inside, x, 0), np.where(inside, dy, 0)
        want_dx, want_dw = oracle.grouped_linear_backward(clean_dy, clean_x, w, np.asarray(sizes), precision)
        assert relative(y, oracle.grouped_linear(clean_x, w, np.asarray(sizes), precision)) < 1e-5
        assert relative(dx, want_dx) < 1e-5
        assert relative(dw, want_dw) < 1e-5
        for expert, size in enumerate(sizes):
            assert size or (np.asarray(dw)[expert] == 0).all()


@pytest.mark.parametrize("granularity", ["tensor", "row", "block_1x128", "block_128x128", "mx"])
def test_quantise_is_bit_exact(granularity, rng):
    from te_plugin.numerics import E4M3

    x = (rng.standard_normal((96, 160)) * np.exp(rng.standard_normal((96, 1)) * 3)).astype(np.float32)
    got = quantize(jnp.asarray(x), "e4m3", granularity, transpose=True)
    want, want_t = oracle.quantize_transpose(x, E4M3, granularity)
    for data, scale, reference in ((got.data, got.scale_inv, want), (got.data_t, got.scale_inv_t, want_t)):
        assert np.array_equal(np.asarray(data).view(np.uint8), reference.data)
        assert np.array_equal(np.asarray(scale), reference.scale_inv.reshape(np.asarray(scale).shape))


def test_quantise_under_vmap_runs_once_an_element(rng):
    x = rng.standard_normal((3, 32, 64)).astype(np.float32)
    got = jax.jit(jax.vmap(lambda x: quantize(x).dequantize()))(x)
    for one, alone in zip(got, x, strict=True):
        assert np.array_equal(one, quantize(jnp.asarray(alone)).dequantize())
