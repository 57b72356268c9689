"""The linear and grouped references: exact in FP32, within the stated error in FP8, equal to the loop over experts."""

import numpy as np
import pytest

from te_plugin import oracle
from te_plugin.numerics import E4M3, E5M2, SCALINGS, scale_from_amax

# On normal data E4M3's own rounding costs 0.0256-0.0265 an operand whatever the scale, 0.0365-0.0375 a product: a bound
# below that (3.5e-2 for blocks) cannot be met by exact arithmetic. Blocks win where the data has outliers.
BOUND = {"fp8_current": 4e-2, "fp8_delayed": 4e-2, "fp8_rowwise": 4e-2, "fp8_block": 3.8e-2, "mxfp8": 4e-2}


def scales_for(precision, x, w, dy):
    if precision != "fp8_delayed":
        return None
    return {
        name: scale_from_amax(np.abs(t).max(), fmt)[0]
        for name, t, fmt in (("activation", x, E4M3), ("weight", w, E4M3), ("gradient", dy, E5M2))
    }


@pytest.mark.parametrize("precision", SCALINGS)
def test_three_products_stay_within_the_stated_error(precision, rng):
    x, w, dy = (rng.standard_normal(s) for s in ((96, 128), (256, 128), (96, 256)))
    scales = scales_for(precision, x, w, dy)
    y = oracle.linear(x, w, None, precision, scales=scales)
    dx = oracle.linear_dgrad(dy, w, precision, scales=scales)
    dw = oracle.linear_wgrad(dy, x, precision, scales=scales)
    gradient_bound = 7e-2 if SCALINGS[precision].gradient_format is E5M2 else BOUND[precision]
    for got, want, bound in (
        (y, x @ w.T, BOUND[precision]),
        (dx, dy @ w, gradient_bound),
        (dw, dy.T @ x, gradient_bound),
    ):
        assert 1e-3 < oracle.compare(got, want).relative < bound


def test_bf16_and_fp32_multiply_the_values_as_given(rng):
    x, w, b = rng.standard_normal((5, 8)), rng.standard_normal((3, 8)), rng.standard_normal(3)
    np.testing.assert_allclose(oracle.linear(x, w, b, "fp32"), x @ w.T + b, rtol=1e-14)


def test_padding_rows_with_zeros_changes_no_product(rng):
    x, w, dy = (rng.standard_normal(s) for s in ((50, 128), (128, 128), (50, 128)))
    padded = [np.concatenate([t, np.zeros((14, 128))]) for t in (x, dy)]
    for precision in ("fp8_current", "fp8_rowwise", "fp8_block", "mxfp8"):
        assert np.array_equal(oracle.linear(padded[0], w, None, precision)[:50], oracle.linear(x, w, None, precision))
        np.testing.assert_allclose(
            oracle.linear_wgrad(padded[1], padded[0], precision),
            oracle.linear_wgrad(dy, x, precision),
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [0, 0, 0], [2, 2, 3], [1, 1, 1]])
@pytest.mark.parametrize("precision", ["bf16", "fp8_rowwise", "mxfp8"])
def test_grouped_is_the_loop_over_experts(sizes, precision, rng):
    x, w, dy = (rng.standard_normal(s) for s in ((9, 32), (3, 16, 32), (9, 16)))
    used = sum(sizes)
    x[used:], dy[used:] = np.nan, np.nan
    y = oracle.grouped_linear(x, w, sizes, precision)
    dx, dw = oracle.grouped_linear_backward(dy, x, w, sizes, precision)
    begin = 0
    for e, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        assert np.array_equal(y[rows], oracle.linear(x[rows], w[e], None, precision))
        assert np.array_equal(dx[rows], oracle.linear_dgrad(dy[rows], w[e], precision))
        if precision == "bf16":
            assert np.array_equal(dw[e], oracle.linear_wgrad(dy[rows], x[rows], precision))
        assert size or not dw[e].any()
        begin += size
    assert not y[used:].any() and not dx[used:].any() and np.isfinite(dw).all()


@pytest.mark.parametrize("precision", ["fp8_rowwise", "fp8_block", "mxfp8"])
def test_scales_along_the_tokens_are_those_of_a_dense_linear_whatever_the_groups(precision, rng):
    x, w, dy = (rng.standard_normal(s) for s in ((300, 128), (3, 256, 128), (300, 256)))
    sizes, used = [44, 0, 200], 244
    x[:44] *= 8  # blocks 0 (rowwise: the only one) and 1 hold both experts
    clean = [np.where((np.arange(300) < used)[:, None], t, 0) for t in (dy, x)]
    x[used:], dy[used:] = np.nan, np.nan
    dw = oracle.grouped_linear_backward(dy, x, w, sizes, precision)[1]
    whole = oracle.linear_wgrad(*clean, precision)
    np.testing.assert_allclose(dw.sum(0), whole, rtol=1e-12, atol=1e-9)
    exact = oracle.grouped_gemm_wgrad(dy, x, sizes)
    for e in (0, 2):
        assert 0 < np.linalg.norm(dw[e] - exact[e]) < 0.06 * np.linalg.norm(exact[e])


def test_one_scale_a_tensor_covers_the_rows_of_all_experts(rng):
    x, w = rng.standard_normal((8, 32)), rng.standard_normal((2, 16, 32))
    x[:4] *= 100
    y = oracle.grouped_linear(x, w, [4, 4], "fp8_current")
    whole = oracle.linear(x, w[1], None, "fp8_current")
    assert np.array_equal(y[4:], whole[4:])
    assert not np.array_equal(y[4:], oracle.linear(x[4:], w[1], None, "fp8_current"))


def test_plain_grouped_products(rng):
    x, w, dy = (rng.standard_normal(s) for s in ((9, 32), (3, 16, 32), (9, 16)))
    sizes = [2, 0, 5]
    assert np.array_equal(oracle.grouped_gemm(x, w, sizes), oracle.grouped_linear(x, w, sizes))
    assert np.array_equal(oracle.grouped_gemm_wgrad(dy, x, sizes), oracle.grouped_linear_backward(dy, x, w, sizes)[1])


@pytest.mark.report("pytorch/torchtitan#1237")
def test_aligned_group_totals():
    counts = [299, 254, 158, 278, 167, 343, 263, 286]
    assert [int(oracle.align_groups(counts, m).sum()) for m in (8, 16, 32)] == [2064, 2096, 2144]
    assert oracle.align_groups([5, 0, 32, 33], 32).tolist() == [32, 0, 32, 64]


def test_group_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="add up to at most the 4 rows"):
        oracle.grouped_gemm(np.zeros((4, 2)), np.zeros((2, 3, 2)), [3, 2])
