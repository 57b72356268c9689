"""Quantise kernels: the same bytes and scales as te_plugin.numerics, every granularity, with and without the transposed copy."""

import numpy as np
import pytest

from te_plugin import numerics
from te_plugin.numerics import E4M3, E5M2, GRANULARITIES

from . import gpu, reference

torch = gpu.torch
pytestmark = pytest.mark.gpu

SHAPES = [(128, 128), (256, 384), (1, 1), (3, 130), (130, 72), (200, 264), (257, 1000), (64, 4096)]


def make(rows, cols, seed=0):
    rng = np.random.default_rng(seed)
    x = (
        rng.standard_normal((rows, cols))
        * np.exp(rng.standard_normal((rows, 1)) * 2)
        * np.exp(rng.standard_normal((1, cols)))
    )
    x[rng.random((rows, cols)) < 0.05] = 0
    if rows > 2:
        x[rows // 2] = 0
    return x.astype(np.float32)


def as_input(x, dtype):
    t = gpu.cuda(x).to(dtype)
    return t, t.float().cpu().numpy()


def check(got, x, granularity, fmt, pow2):
    codes, inverse = reference.quantize(x, granularity, fmt, pow2)
    np.testing.assert_array_equal(got["scale_inv"], inverse)
    np.testing.assert_array_equal(got["data"], codes)
    if "data_t" in got:
        codes_t, inverse_t = reference.quantize(np.ascontiguousarray(x.T), granularity, fmt, pow2)
        np.testing.assert_array_equal(got["scale_inv_t"], inverse_t)
        np.testing.assert_array_equal(got["data_t"], codes_t)
    amax = np.max(np.abs(x)) if x.size else np.float32(0)
    np.testing.assert_array_equal(got["stats"], [amax, np.sum(~np.isfinite(x))])


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "rows+transposed"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_bytes_and_scales_equal_the_rules(granularity, fmt, transpose):
    for number, (rows, cols) in enumerate(SHAPES):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for pow2 in (False, True):
                t, x = as_input(make(rows, cols, number), dtype)
                check(gpu.quantize(t, granularity, fmt, pow2, transpose), x, granularity, fmt, pow2)


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "rows+transposed"])
def test_scales_of_1x128_blocks_may_lie_block_after_block(transpose):
    for number, (rows, cols) in enumerate(SHAPES):
        for dtype in (torch.bfloat16, torch.float32):
            t, x = as_input(make(rows, cols, number), dtype)
            check(gpu.quantize(t, "block_1x128", transpose=transpose, by_block=True), x, "block_1x128", E4M3, False)


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "rows+transposed"])
@pytest.mark.parametrize("rows,cols", [(257, 1000), (300, 256), (130, 72), (64, 33)])  # the last: rows off 16 bytes
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_that_are_not_used_count_as_zero_whatever_they_hold(granularity, rows, cols, transpose):
    for dtype in (torch.bfloat16, torch.float32):
        x, values = as_input(make(rows, cols), dtype)
        for used in (0, 1, 63, 128, rows - 1, rows, rows + 1000, -5):
            inside = np.arange(rows)[:, None] < used
            poisoned = torch.where(gpu.cuda(inside), x, float("nan"))
            count = torch.tensor([used], device="cuda")
            got = gpu.quantize(poisoned, granularity, transpose=transpose, used=count)
            check(got, np.where(inside, values, np.float32(0)), granularity, E4M3, False)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_non_finite_values_reach_the_result_and_are_counted(granularity, bad):
    x = make(260, 390, 5)
    x[131, 257] = bad
    x[3, 4] = bad
    for dtype in (torch.bfloat16, torch.float32):
        t, values = as_input(x, dtype)
        check(gpu.quantize(t, granularity, transpose=True), values, granularity, E4M3, False)


@pytest.mark.report("pytorch/ao#4713")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zero_tensor_has_zero_data_and_unit_scale(granularity):
    t = torch.zeros(140, 200, dtype=torch.bfloat16, device="cuda")
    got = gpu.quantize(t, granularity, transpose=True)
    assert not got["data"].any() and not got["data_t"].any()
    assert (got["scale_inv"] == (127 if granularity == "mx" else 1)).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_tiny_and_huge_values_keep_finite_scales(granularity):
    for factor in (1e-45, 1e-42, 1e-38, 1e30, 3e38):
        x = np.random.default_rng(1).uniform(-1, 1, (130, 140)).astype(np.float32) * np.float32(factor)
        for pow2 in (False, True):
            check(gpu.quantize(gpu.cuda(x), granularity, E4M3, pow2, True), x, granularity, E4M3, pow2)


def test_rows_apart_and_unaligned_starts():
    base, values = as_input(make(300, 520, 7), torch.bfloat16)
    for rows, cols in (
        (slice(0, 300), slice(0, 256)),
        (slice(1, 200), slice(3, 300)),
        (slice(0, 300, 2), slice(8, 136)),
    ):
        for granularity in GRANULARITIES:
            check(
                gpu.quantize(base[rows, cols], granularity, transpose=True),
                np.ascontiguousarray(values[rows, cols]),
                granularity,
                E4M3,
                False,
            )


@pytest.mark.report("pytorch/ao#1912")
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_given_scale_saturates_and_keeps_nan(fmt):
    x = make(130, 264, 3)
    x[0, :6] = [448, 449, 480, -1e30, np.inf, np.nan]
    t, x = as_input(x, torch.float32)
    for scale in (1.0, 0.37, 224.0):
        s = torch.tensor([scale], device="cuda")
        data, data_t, inverse, stats = (
            gpu.poisoned((130, 264), torch.uint8),
            gpu.poisoned((264, 130), torch.uint8),
            gpu.poisoned((1,), torch.float32),
            gpu.poisoned((2,), torch.float32),
        )
        gpu.call("quantize_with_scale_transpose", t, s, data, data_t, inverse, stats, fmt.code)
        with np.errstate(invalid="ignore", over="ignore"):
            codes = fmt.encode(x * np.float32(scale))
        np.testing.assert_array_equal(data.cpu().numpy(), codes)
        np.testing.assert_array_equal(data_t.cpu().numpy(), codes.T)
        assert inverse.item() == np.float32(1) / np.float32(scale)
        assert np.isnan(stats[0].item()) and stats[1].item() == 2
        gpu.call("quantize_with_scale", t, s, data.zero_(), inverse, stats, fmt.code)
        np.testing.assert_array_equal(data.cpu().numpy(), codes)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_dequantize_inverts_exactly(granularity):
    for rows, cols in SHAPES:
        for fmt in (E4M3, E5M2):
            codes, inverse = reference.quantize(make(rows, cols), granularity, fmt)
            y = gpu.poisoned((rows, cols), torch.float32)
            gpu.call(
                "dequantize", gpu.cuda(codes), gpu.cuda(inverse), y, numerics.GRANULARITY_CODE[granularity], fmt.code
            )
            want = reference.dequantize(codes, inverse, granularity, fmt).astype(np.float32)
            np.testing.assert_array_equal(y.cpu().numpy(), want)
            if granularity == "block_1x128":
                y.fill_(float("nan"))
                code = numerics.GRANULARITY_CODE[granularity]
                gpu.call("dequantize", gpu.cuda(codes), gpu.cuda(inverse.T).t(), y, code, fmt.code)
                np.testing.assert_array_equal(y.cpu().numpy(), want)


def test_empty_tensors():
    for shape in ((0, 128), (128, 0)):
        got = gpu.quantize(torch.empty(shape, dtype=torch.bfloat16, device="cuda"), "tensor", transpose=True)
        assert got["scale_inv"] == 1 and got["scale_inv_t"] == 1 and not got["stats"].any()
    got = gpu.quantize(torch.empty((0, 40), dtype=torch.bfloat16, device="cuda"), "row", transpose=True)
    assert (got["scale_inv_t"] == 1).all()


def test_bad_calls_raise_before_any_launch():
    x = torch.zeros(128, 128, dtype=torch.bfloat16, device="cuda")
    data, inverse, stats = (
        gpu.poisoned((128, 128), torch.uint8),
        gpu.poisoned((1,), torch.float32),
        gpu.poisoned((2,), torch.float32),
    )
    for args, word in (
        ((x.cpu(), data, inverse, stats, 0, 0, 0), "CUDA"),
        ((x, data[:64], inverse, stats, 0, 0, 0), "data"),
        ((x, data, inverse, stats, 1, 0, 0), "scale_inv"),
        ((x, data, inverse, stats, 0, 2, 0), "format"),
        ((x, data, inverse, stats, 9, 0, 0), "granularity"),
        ((x.t(), data, inverse, stats, 0, 0, 0), "stride"),
        ((x.int(), data, inverse, stats, 0, 0, 0), "bfloat16"),
    ):
        with pytest.raises(ValueError, match=word):
            gpu.call("quantize", *args)
    apart = gpu.poisoned((256, 3), torch.float32)[::2]
    with pytest.raises(ValueError, match="scale_inv must be contiguous, or the transpose"):
        gpu.call("quantize", x.expand(1, 128, 128)[0].repeat(1, 3), data.repeat(1, 3), apart, stats, 2, 0, 0)
    torch.cuda.synchronize()
