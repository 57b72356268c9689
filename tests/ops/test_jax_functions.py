"""te_plugin.jax against the oracle: every function, every kernel it can plan, few shapes (XLA compiles anew for each)."""

import numpy as np
import pytest

from te_plugin import oracle
from te_plugin.numerics import FORMATS, GRANULARITIES, SCALINGS
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.ops.norm.problem import NormProblem
from te_plugin.plan import Target, registered

from .reference import rounded

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
tj = pytest.importorskip("te_plugin.jax")

DTYPE = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
BOUND = {"fp32": 5e-6, "bf16": 6e-3}


def kernels(problem) -> list[str]:
    """Kernels that JAX can plan on this machine."""
    return [k.name for k in registered(problem.op) if k.supports(problem, Target("cpu", "jax"))]


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def with_gradients(function, inputs, dy, dtype) -> list[np.ndarray]:
    """[y, gradient of each input] in float64."""
    y, pull = jax.vjp(function, *(jnp.asarray(x, dtype=DTYPE[dtype]) for x in inputs))
    return [f64(y), *(f64(g) for g in pull(jnp.asarray(dy, dtype=y.dtype)))]


def assert_close(got, want, dtype):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        found = oracle.compare(a, b, BOUND[dtype])
        assert found.relative <= BOUND[dtype], f"{'y' if i == 0 else f'gradient {i}'}: {found}"


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e4m3_fnuz"])
def test_quantise_is_bit_equal_to_the_oracle(granularity, fmt, rng):
    x = (rng.standard_normal((70, 160)) * 10 ** rng.uniform(-3, 3, (70, 1))).astype(np.float32)
    x[3], x[5, 7] = 0, np.nan if granularity != "tensor" else 1
    made = tj.quantize(jnp.asarray(x), fmt, granularity, transpose=True)
    row, column = oracle.quantize_transpose(x, FORMATS[fmt], granularity)
    for data, scale_inv, want in ((made.data, made.scale_inv, row), (made.data_t, made.scale_inv_t, column)):
        assert np.array_equal(np.asarray(data).view(np.uint8), want.data)
        assert np.array_equal(np.asarray(scale_inv), want.scale_inv, equal_nan=granularity != "mx")
    values = tj.dequantize(made.data, made.scale_inv, granularity)
    np.testing.assert_array_equal(np.asarray(values), oracle.dequantize(row).astype(np.float32))
    with pytest.raises(ValueError, match="'column' is not one of tensor, row"):
        tj.dequantize(made.data, made.scale_inv, "column")
    with pytest.raises(ValueError, match="floating point numbers, not int8"):
        tj.dequantize(made.data, made.scale_inv, granularity, jnp.int8)


@pytest.mark.parametrize("precision,dtype", [("fp32", "fp32"), ("bf16", "bf16"), *((p, "fp32") for p in SCALINGS)])
def test_linear_equals_the_oracle(precision, dtype, rng):
    n, k = (256, 128) if precision == "fp8_block" else (96, 64)
    x, weight, dy = (rounded(rng.standard_normal(s), dtype) for s in ((50, k), (n, k), (50, n)))
    given = dict(activation=100.0, weight=90.0, gradient=8000.0) if precision == "fp8_delayed" else None
    options = {"scales": jnp.asarray(list(given.values()), jnp.float32)} if given else {}
    got = with_gradients(lambda x, w: tj.linear(x, w, None, precision, **options), (x, weight), dy, dtype)
    want = [oracle.linear(x, weight, None, precision, scales=given), oracle.linear_dgrad(dy, weight, precision, scales=given),
            oracle.linear_wgrad(dy, x, precision, scales=given)]  # fmt: skip
    assert_close(got, want, dtype)


@pytest.mark.report("tgale96/grouped_gemm#36")
@pytest.mark.parametrize("kernel", kernels(GroupedGemmProblem(35, 48, 64, 4)))
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("precision,dtype", [("fp32", "fp32"), ("bf16", "bf16"), ("fp8_current", "fp32"), ("fp8_current", "bf16"),
                                             ("fp8_rowwise", "fp32"), ("fp8_block", "fp32"), ("mxfp8", "fp32")])
def test_grouped_linear_equals_the_oracle(kernel, precision, dtype, layout, rng):
    sizes, rows = [5, 0, 20, 7], 35
    n, k = (128, 256) if precision == "fp8_block" else (96, 64)
    x, weight, dy = (rounded(rng.standard_normal(s), dtype) for s in ((rows, k), (4, n, k), (rows, n)))
    x[32:], dy[32:] = np.nan, np.nan
    turn = (lambda w: w) if layout == "nk" else (lambda w: jnp.swapaxes(w, 1, 2))

    def run(x, w):
        return tj.grouped_linear(x, turn(w), jnp.asarray(sizes), precision, layout=layout, kernel=kernel, fallback="allow")

    got = with_gradients(run, (x, weight), dy, dtype)
    want = [oracle.grouped_linear(x, weight, sizes, precision), *oracle.grouped_linear_backward(dy, x, weight, sizes, precision)]
    assert_close(got, want, dtype)
    assert (got[2][1] == 0).all() and (got[0][32:] == 0).all() and (got[1][32:] == 0).all()


@pytest.mark.parametrize("kernel", kernels(NormProblem(33, 64)))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_pointwise_functions_equal_the_oracle(kernel, dtype, rng):
    x, weight, dy = (rounded(rng.standard_normal(s), dtype) for s in ((33, 64), (64,), (33, 64)))
    got = with_gradients(lambda x, w: tj.rms_norm(x, w, kernel=kernel), (x, weight), dy, dtype)
    assert_close(got, [oracle.rms_norm_forward(x, weight)[0], *oracle.rms_norm_backward(dy, x, weight)], dtype)
    half = dy[:, :32]
    got = with_gradients(lambda x: tj.swiglu(x, kernel=kernel), (x,), half, dtype)
    assert_close(got, [oracle.swiglu_forward(x), oracle.swiglu_backward(half, x)], dtype)
    x, dy = x.reshape(33, 2, 32), dy.reshape(33, 2, 32)
    positions, inv_freq = rng.integers(0, 5000, 33), oracle.rope_inv_freq(32)
    rope = lambda x: tj.rope(x, jnp.asarray(positions), inv_freq=jnp.asarray(inv_freq), kernel=kernel)  # noqa: E731
    got = with_gradients(rope, (x,), dy, dtype)
    assert_close(got, [oracle.rope(x, positions, inv_freq), oracle.rope(dy, positions, inv_freq, inverse=True)], dtype)
    logits, labels, dloss = x.reshape(33, 64), rng.integers(0, 64, 33), rounded(rng.standard_normal(33), "fp32")
    labels[::4] = -100
    got = with_gradients(lambda x: tj.cross_entropy(x, jnp.asarray(labels), kernel=kernel), (logits,), dloss, dtype)
    assert_close(
        got, [oracle.cross_entropy_forward(logits, labels)[0], oracle.cross_entropy_backward(dloss, logits, labels)], dtype
    )


@pytest.mark.parametrize("precision", ["fp32", "fp8_current", "fp8_block"])
def test_a_linears_kernel_names_its_products(precision, rng):
    x, w = (jnp.asarray(rng.standard_normal((128, 128), dtype=np.float32)) for _ in range(2))
    named = tj.linear(x, w, precision=precision, kernel="composite")
    assert (named == tj.linear(x, w, precision=precision, kernel="composite" if precision == "fp32" else "auto")).all()


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_a_float32_bias_does_not_widen_the_output_and_has_the_outputs_width(precision):
    x, w = jnp.ones((4, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    assert tj.functional.linear(x, w, jnp.ones(128), precision).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"bias has shape \(4, 1\)"):
        tj.functional.linear(x, w, jnp.ones((4, 1)), precision)


def test_places_and_counts_are_integers():
    x = jnp.ones((4, 128))
    for call in (lambda: tj.functional.cross_entropy(x, jnp.full(4, 0.5)),
                 lambda: tj.functional.rope(x.reshape(4, 1, 128), jnp.full(4, 0.5), inv_freq=jnp.ones(64)),
                 lambda: tj.functional.grouped_linear(x, jnp.ones((1, 128, 128)), jnp.full(1, 2.5))):
        with pytest.raises(ValueError, match="must be integers, got float32"):
            call()
    with pytest.raises(ValueError, match="group_sizes must be an array of integers, got list"):
        tj.functional.grouped_linear(x, jnp.ones((1, 128, 128)), [4])


@pytest.mark.report("huggingface/transformers#39408")
@pytest.mark.parametrize("window", [4, (2.5, 0)], ids=str)
def test_a_window_says_both_sides_in_whole_keys(window):
    q = jnp.ones((8, 1, 16))
    with pytest.raises(ValueError, match=r"\(W - 1, 0\)"):
        tj.functional.attention(q, q, q, cu_seqlens_q=jnp.array([0, 8], jnp.int32), window=window)


def test_a_softmax_scale_may_be_an_array_and_a_list_is_no_array():
    q = jnp.ones((8, 1, 16))
    cu = jnp.array([0, 8], jnp.int32)
    tj.functional.attention(q, q, q, cu_seqlens_q=cu, softmax_scale=jnp.float32(0.5))
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be int32\[N\+1\]"):
        tj.functional.attention(q, q, q, cu_seqlens_q=[0, 8])


@pytest.mark.parametrize("function", ["linear", "grouped_linear"])
def test_second_derivatives_through_fp8_are_refused_and_not_zero(function):
    """What is quantised is a constant for JAX: differentiating a gradient would give 0 without a word."""
    if function == "linear":
        loss = lambda x: (tj.functional.linear(x, jnp.ones((128, 128)), precision="fp8_current") ** 2).sum()
    else:
        loss = lambda x: (tj.functional.grouped_linear(x, jnp.ones((1, 128, 128)), jnp.array([4]), "fp8_current") ** 2).sum()
    x = jnp.ones((4, 128))
    assert jax.grad(lambda x: jax.checkpoint(loss)(x))(x).any()
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x)


def test_shapes_that_are_no_matrices_are_refused_with_those_that_are_taken():
    x, w = jnp.ones((4, 128)), jnp.ones((128, 128))
    for arguments, says in ((([[1.0]], w), "x is a list"), ((jnp.float32(1), w), r"got \(\)"), ((x, w[None]), r"\(1, 128")):
        with pytest.raises(ValueError, match=r"linear takes x\[...,K\], weight\[N,K\].*" + says):
            tj.linear(*arguments)
    with pytest.raises(ValueError, match="scale has 2 numbers"):
        tj.quantize(x, scale=jnp.ones(2))
    assert tj.quantize(x, scale=2.0).scale_inv == 0.5


def test_experts_of_another_dtype_are_cast_as_a_linear_layers_weight_is(rng):
    x = jnp.asarray(rng.standard_normal((8, 128)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((2, 128, 128), dtype=np.float32))
    sizes = jnp.array([3, 5])
    y, dw = jax.value_and_grad(lambda w: tj.grouped_linear(x, w, sizes).astype(jnp.float32).sum())(w)
    assert y == tj.grouped_linear(x, w.astype(jnp.bfloat16), sizes).astype(jnp.float32).sum() and dw.dtype == jnp.float32


def test_float64_products_are_added_up_in_float64(rng):
    with jax.enable_x64(True):
        x, w = (jnp.asarray(rng.standard_normal((128, 128))) for _ in range(2))
        assert np.abs(tj.linear(x, w) - np.asarray(x) @ np.asarray(w).T).max() < 1e-12


@pytest.mark.report("jax-ml/jax#12008")
@pytest.mark.parametrize("function", ["linear", "attention"])
def test_float32_products_are_not_left_to_tensor_cores_of_fewer_bits(function):
    """XLA's default precision is TF32 on a GPU, ten bits of mantissa; forward and backward say otherwise."""
    x, cu = jnp.ones((8, 128)), jnp.array([0, 8], jnp.int32)
    if function == "linear":
        run = lambda x: (tj.linear(x, jnp.ones((128, 128))) ** 2).sum()
    else:
        run = lambda x: (tj.attention(*(x.reshape(8, 4, 32),) * 3, cu_seqlens_q=cu, kernel="composite") ** 2).sum()
    program = str(jax.make_jaxpr(jax.grad(run))(x))
    assert program.count("dot_general[") >= 2
    assert program.count("dot_general[") == program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
@pytest.mark.parametrize("call", [
    lambda v: tj.linear(jnp.ones((16, 64)), jnp.ones((64, 64)), precision="fp8_current", pow2_scale=v),
    lambda v: tj.grouped_linear(jnp.ones((16, 64)), jnp.ones((1, 64, 64)), jnp.array([16]), "fp8_current", pow2_scale=v),
    lambda v: tj.quantize(jnp.ones((16, 64)), pow2_scale=v),
    lambda v: tj.attention(*[jnp.ones((16, 2, 32))] * 3, cu_seqlens_q=jnp.array([0, 16], jnp.int32), return_lse=v),
], ids=["linear", "grouped_linear", "quantize", "attention"])  # fmt: skip
def test_flags_are_true_or_false(call):
    with pytest.raises(ValueError, match="='no' must be True or False"):
        call("no")


def test_scales_cannot_be_chosen_where_none_is_computed():
    x, w = jnp.ones((16, 64)), jnp.ones((64, 64))
    for precision, options in (("bf16", {}), ("fp8_delayed", {"scales": jnp.ones(3)})):
        with pytest.raises(ValueError, match=f"pow2_scale=True: precision {precision}"):
            tj.linear(x, w, precision=precision, pow2_scale=True, **options)
    with pytest.raises(ValueError, match="pow2_scale=True: precision bf16 has no scales"):
        tj.grouped_linear(x, w[None], jnp.array([16]), pow2_scale=True)
    with pytest.raises(ValueError, match="pow2_scale=True: scale is given"):
        tj.quantize(x, scale=jnp.ones(1), pow2_scale=True)
