"""JAX on a Hopper GPU: every function against the oracle, with the sm90 kernels behind it, called by XLA on its own stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin import ffi, oracle
from te_plugin.jax import cross_entropy, grouped_linear, launches, linear, quantize, rms_norm, rope, swiglu
from te_plugin.numerics import E4M3, E5M2

from .test_linear import relative


def hopper() -> bool:
    return (jax.default_backend() == "gpu" and str(jax.devices()[0].compute_capability) == "9.0" and ffi.is_built("sm90"))


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper(), reason="JAX sees no Hopper GPU, or sm90 is not built")]

# FP8 tensor cores keep about 14 bits of a sum over 128 values; a BF16 result has 8.
BOUND = {"fp32": 2e-3, "bf16": 5e-3}
DTYPE = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
# fp8_delayed is given its scales; mxfp8 has no kernel on Hopper.
LINEARS = ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block"]
GROUPED = ["fp8_current", "fp8_rowwise", "fp8_block"]


def draw(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), DTYPE[dtype])


def f64(x):
    return np.asarray(x).astype(np.float64)


def kernels_of(op: str) -> set[str]:
    return {row["kernel"] for row in launches.snapshot() if row["op"] == op}


@pytest.fixture(autouse=True)
def counted():
    jax.clear_caches()
    launches.reset()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("granularity", ["tensor", "row", "block_1x128", "block_128x128", "mx"])
def test_quantise_is_bit_exact(granularity, fmt, rng):
    x = (rng.standard_normal((96, 160)) * np.exp(rng.standard_normal((96, 1)) * 3)).astype(np.float32)
    got = jax.jit(lambda x: quantize(x, fmt.name, granularity, transpose=True))(x)
    want, want_t = oracle.quantize_transpose(x, fmt, granularity)
    for data, scale, reference in ((got.data, got.scale_inv, want), (got.data_t, got.scale_inv_t, want_t)):
        assert np.array_equal(np.asarray(data).view(np.uint8), reference.data)
        assert np.array_equal(np.asarray(scale), reference.scale_inv.reshape(np.asarray(scale).shape))
    assert kernels_of("quantize") == {"sm90"}


@pytest.mark.parametrize("rows", [256, 200])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("precision", LINEARS)
def test_linear_equals_the_oracle_on_sm90(precision, layout, dtype, rows, rng):
    x, w, dy = draw(rng, (rows, 384), dtype), draw(rng, (512, 384), dtype), draw(rng, (rows, 512), dtype)
    given = dict(activation=100.0, weight=90.0, gradient=8000.0) if precision == "fp8_delayed" else None
    options = {"scales": jnp.asarray(list(given.values()), jnp.float32)} if given else {}

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: linear(x, w, precision=precision, layout=layout, **options), x,
                          w if layout == "nk" else w.T)
        return y, *pull(dy)

    y, dx, dw = run(x, w, dy)
    ax, aw, ady = f64(x), f64(w), f64(dy)
    assert relative(f64(y), oracle.linear(ax, aw, None, precision, scales=given)) < BOUND[dtype]
    assert relative(f64(dx), oracle.linear_dgrad(ady, aw, precision, scales=given)) < BOUND[dtype]
    dw = f64(dw) if layout == "nk" else f64(dw).T
    assert relative(dw, oracle.linear_wgrad(ady, ax, precision, scales=given)) < BOUND[dtype]
    assert kernels_of("gemm") == {"sm90"}


@pytest.mark.parametrize("sizes", [[100, 0, 300, 7], [0, 0, 512, 0], [128, 256, 128, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("precision", ["bf16", *GROUPED])
def test_grouped_linear_equals_the_oracle_on_sm90(precision, layout, sizes, rng):
    rows, used = 530, sum(sizes)
    x, w, dy = draw(rng, (rows, 256), "bf16"), draw(rng, (4, 384, 256), "bf16"), draw(rng, (rows, 384), "bf16")
    x, dy = x.at[used:].set(jnp.nan), dy.at[used:].set(jnp.nan)

    @jax.jit
    def run(x, w, dy, groups):
        turned = w if layout == "nk" else jnp.swapaxes(w, 1, 2)
        y, pull = jax.vjp(lambda x, w: grouped_linear(x, w, groups, precision, layout=layout), x, turned)
        return y, *pull(dy)

    y, dx, dw = run(x, w, dy, jnp.asarray(sizes, jnp.int32))
    dw = f64(dw) if layout == "nk" else f64(dw).transpose(0, 2, 1)
    want_dx, want_dw = oracle.grouped_linear_backward(f64(dy), f64(x), f64(w), sizes, precision)
    wanted = (oracle.grouped_linear(f64(x), f64(w), sizes, precision), want_dx, want_dw)
    for got, want in zip((f64(y), f64(dx), dw), wanted, strict=True):
        assert np.linalg.norm(got - want) <= BOUND["bf16"] * np.linalg.norm(want)
    assert not f64(y)[used:].any() and not f64(dx)[used:].any()
    assert all(size or not dw[e].any() for e, size in enumerate(sizes))
    assert kernels_of("grouped_gemm") == {"sm90"}
    if precision == "bf16":  # a weight is read as it lies, whichever dimension is summed over
        stages = {stage for row in launches.snapshot() if row["op"] == "grouped_gemm" for stage in row["traced"]}
        assert stages == {"forward", "dgrad", "wgrad"}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_pointwise_functions_equal_the_oracle_on_sm90(dtype, rng):
    bound = {"fp32": 1e-5, "bf16": 6e-3}[dtype]

    def check(function, inputs, dy, want):
        y, pull = jax.vjp(jax.jit(function), *inputs)
        for got, wanted in zip((y, *pull(dy.astype(y.dtype))), want, strict=True):
            assert relative(f64(got), wanted) < bound

    x, weight, dy = draw(rng, (130, 512), dtype), draw(rng, (512,), dtype), draw(rng, (130, 512), dtype)
    ax, aweight, ady = f64(x), f64(weight), f64(dy)
    check(rms_norm, (x, weight), dy, [oracle.rms_norm_forward(ax, aweight)[0], *oracle.rms_norm_backward(ady, ax, aweight)])
    half = dy[:, :256]
    check(swiglu, (x,), half, [oracle.swiglu_forward(ax), oracle.swiglu_backward(f64(half), ax)])
    positions, inv_freq = rng.integers(0, 5000, 130), oracle.rope_inv_freq(128)
    turn = lambda x: rope(x, jnp.asarray(positions), inv_freq=jnp.asarray(inv_freq))  # noqa: E731
    heads, aheads, adheads = x.reshape(130, 4, 128), ax.reshape(130, 4, 128), ady.reshape(130, 4, 128)
    check(turn, (heads,), dy.reshape(130, 4, 128),
          [oracle.rope(aheads, positions, inv_freq), oracle.rope(adheads, positions, inv_freq, inverse=True)])
    labels, dloss = rng.integers(0, 512, 130), draw(rng, (130,), "fp32")
    labels[::4] = -100
    check(lambda x: cross_entropy(x, jnp.asarray(labels)), (x,), dloss,
          [oracle.cross_entropy_forward(ax, labels)[0], oracle.cross_entropy_backward(f64(dloss), ax, labels)])
    for op in ("norm", "activation", "rope", "loss"):
        assert kernels_of(op) == {"sm90"}, op


def test_kernels_run_in_the_order_of_xlas_stream(rng):
    """Operands are made by XLA just before and freed just after: on another stream they would be read too early or too late."""

    @jax.jit
    def chain(x, w):
        for _ in range(20):
            x = linear(jnp.tanh(x * 3), w, precision="fp8_rowwise")
        return x

    x, w = draw(rng, (2048, 1024), "bf16"), draw(rng, (1024, 1024), "bf16") / 16
    first = np.asarray(chain(x, w).astype(jnp.float32))
    for _ in range(5):
        assert np.array_equal(np.asarray(chain(x, w).astype(jnp.float32)), first)
    step = jax.jit(lambda x, w: linear(jnp.tanh(x * 3), w, precision="fp8_rowwise"))
    y = x
    for _ in range(20):
        y = jax.block_until_ready(step(y, w))
    assert relative(first, f64(y)) < 2e-2
