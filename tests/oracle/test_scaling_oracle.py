"""The reference of quantisation against exact numbers and against torch's own FP8 types."""

import numpy as np
import pytest
import torch

from te_plugin import oracle
from te_plugin.numerics import (
    E4M3,
    E4M3_FNUZ,
    E5M2,
    E5M2_FNUZ,
    E8M0,
    FORMATS,
    GRANULARITIES,
    fp8_max,
    scale_from_amax,
    token_multiple,
)

TORCH = {fmt: getattr(torch, fmt.torch_dtype) for fmt in FORMATS.values()}


@pytest.mark.report("ROCm/TransformerEngine#143")
def test_ocp_and_fnuz_bytes_mean_different_numbers():
    codes = np.array([0x38, 0x7E, 0x80, 0x7F], dtype=np.uint8)
    ocp, fnuz = E4M3.decode(codes), E4M3_FNUZ.decode(codes)
    assert ocp[:2].tolist() == [1.0, 448.0] and fnuz[:2].tolist() == [0.5, 224.0]
    assert ocp[2] == 0 and np.signbit(ocp[2]) and np.isnan(fnuz[2])
    assert np.isnan(ocp[3]) and fnuz[3] == 240
    assert [fp8_max(arch) for arch in ("gfx942", "gfx950", "sm90")] == [240, 448, 448]
    assert fp8_max("gfx942", "e5m2") == 57344


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_code_decodes_as_in_torch(fmt):
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(TORCH[fmt]).float().numpy()
    np.testing.assert_array_equal(fmt.decode(codes), want)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_values_in_range_encode_as_in_torch(fmt, rng):
    exponents = rng.uniform(np.log2(fmt.smallest) - 3, np.log2(fmt.max), 20000)
    finite = fmt.decode(np.arange(128, dtype=np.uint8)).astype(np.float64)
    finite = finite[np.isfinite(finite)]
    values = np.concatenate([2**exponents * rng.choice([-1, 1], 20000), finite, (finite[1:] + finite[:-1]) / 2]).astype(
        np.float32
    )
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-np.inf))])
    values = values[np.abs(values) <= fmt.max]
    want = torch.from_numpy(values).to(TORCH[fmt]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(fmt.encode(values), want)


@pytest.mark.report("pytorch/ao#1912")
def test_out_of_range_saturates_nan_stays_and_small_values_round_to_even():
    x = np.array([[448, 449, 465, 480, 500, 1000, -1000, np.nan, np.inf, -np.inf, 2**-9, 2**-10, 2**-11]], dtype=np.float32)
    got = E4M3.decode(oracle.quantize_with_scale(x, 1.0, E4M3).data)[0]
    assert got[:6].tolist() == [448] * 6 and got[6] == -448 and np.isnan(got[7])
    assert got[8:].tolist() == [448, -448, 2**-9, 0, 0]
    x = np.array([[60000, 61440, 65536, np.inf]], dtype=np.float32)
    assert E5M2.decode(oracle.quantize_with_scale(x, 1.0, E5M2).data)[0].tolist() == [57344] * 4
    assert E5M2_FNUZ.decode(E5M2_FNUZ.encode(x))[0].tolist() == [57344] * 4


@pytest.mark.report("pytorch/ao#4713")
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_zeros_keep_scale_one_and_other_blocks_do_not_notice(granularity, fmt, rng):
    zero = oracle.quantize(np.zeros((4, 128)), fmt, granularity)
    scale_inv = E8M0.decode(zero.scale_inv) if granularity == "mx" else zero.scale_inv
    assert not zero.data.any() and (scale_inv == 1).all()
    x = rng.standard_normal((4, 128)).astype(np.float32)
    whole = oracle.quantize(x, fmt, granularity)
    x[2] = 0
    holed = oracle.quantize(x, fmt, granularity)
    assert not oracle.dequantize(holed)[2].any()
    if granularity in ("row", "block_1x128", "mx"):
        assert np.array_equal(holed.data[[0, 1, 3]], whole.data[[0, 1, 3]])
        assert np.array_equal(holed.scale_inv[[0, 1, 3]], whole.scale_inv[[0, 1, 3]])


@pytest.mark.report("pytorch/ao#1766")
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_scale_arithmetic_is_fp32_for_half_precision_inputs(dtype):
    x = oracle.quantize(np.array([[0, 0, 0.1, 0.1]], dtype=dtype), E5M2)
    assert E5M2.decode(x.data)[0].tolist() == [0, 0, 57344, 57344]
    np.testing.assert_allclose(x.scale_inv, np.float32(dtype(0.1)) / 57344, rtol=2e-7)
    if dtype is np.float16:
        np.testing.assert_allclose(oracle.dequantize(x)[0], [0, 0, 0.09997559, 0.09997559], rtol=1e-6)


@pytest.mark.report("NVIDIA/TransformerEngine#567")
def test_scale_belongs_to_the_values_that_are_quantised():
    w = np.array([[4, -2, 0.1]], dtype=np.float32)
    fresh = oracle.quantize(w, E4M3)
    np.testing.assert_allclose(1 / fresh.scale_inv, 112, rtol=1e-6)
    np.testing.assert_allclose(oracle.dequantize(fresh)[0], [4, -2, 0.0982], atol=1e-4)
    stale = oracle.dequantize(oracle.quantize_with_scale(w, 8960, E4M3))
    np.testing.assert_allclose(stale[0], [0.05, -0.05, 0.05], rtol=1e-6)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_nan_reaches_every_value_of_its_block_and_no_other(granularity, rng):
    x = rng.standard_normal((130, 260)).astype(np.float32)
    x[3, 130] = np.nan
    got = np.isnan(oracle.dequantize(oracle.quantize(x, E4M3, granularity)))
    want = np.zeros_like(got)
    rows, columns = {
        "tensor": (slice(None), slice(None)),
        "row": (3, slice(None)),
        "block_1x128": (3, slice(128, 256)),
        "block_128x128": (slice(0, 128), slice(128, 256)),
        "mx": (3, slice(128, 160)),
    }[granularity]
    want[rows, columns] = True
    np.testing.assert_array_equal(got, want)
    assert np.isnan(oracle.amax_and_nonfinite(x)[0]) and oracle.amax_and_nonfinite(x)[1] == 1


def test_infinities_and_tiny_numbers_leave_finite_scales():
    for x in ([[np.inf, 1.0]], [[1e-45, 0.0]], [[1e-38, -1e-40]], [[3e38, 1.0]]):
        for fmt in FORMATS.values():
            q = oracle.quantize(np.array(x, dtype=np.float32), fmt)
            assert np.isfinite(q.scale_inv).all() and (q.scale_inv > 0).all()
            assert np.isfinite(oracle.dequantize(q)).all()


def test_power_of_two_scales_round_up():
    assert E8M0.encode(scale_from_amax(448, E4M3, pow2=True)[1]) == 127
    assert E8M0.encode(scale_from_amax(449, E4M3, pow2=True)[1]) == 128
    for amax in (1e-30, 0.1, 1.0, 448.0, 449.0, 1e30):
        scale, scale_inv = scale_from_amax(amax, E4M3, pow2=True)
        assert (
            np.frexp(scale_inv)[0] == 0.5
            and scale * scale_inv == 1
            and np.float32(amax) * scale <= 448 < np.float32(amax) * scale * 2
        )


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (129, 33), (128, 256), (0, 64), (257, 5)])
def test_scale_shapes_error_and_transposed_copy(granularity, shape, rng):
    x = (rng.standard_normal(shape) * 10 ** rng.uniform(-2, 2, shape)).astype(np.float32)
    rows, columns = shape
    up = lambda a, b: -(-a // b)  # noqa: E731
    scale_shape = {
        "tensor": lambda r, c: (1,),
        "row": lambda r, c: (r,),
        "block_1x128": lambda r, c: (r, up(c, 128)),
        "block_128x128": lambda r, c: (up(r, 128), up(c, 128)),
        "mx": lambda r, c: (r, up(c, 32)),
    }[granularity]
    q, q_t = oracle.quantize_transpose(x, E4M3, granularity)
    assert q.data.shape == shape and q.scale_inv.shape == scale_shape(rows, columns)
    assert q_t.data.shape == (columns, rows) and q_t.scale_inv.shape == scale_shape(columns, rows)
    for copy, of in ((q, x), (q_t, x.T)):
        amax = np.abs(of).max(initial=0)
        # Half a mantissa step of each value, or half of the smallest code at the block's scale.
        assert (np.abs(oracle.dequantize(copy) - of) <= np.maximum(np.abs(of) / 16, amax * 2 / 448 * 2**-10) * 1.00001).all()
    if granularity in ("tensor", "block_128x128"):
        assert np.array_equal(q.data.T, q_t.data) and np.array_equal(q.scale_inv.T, q_t.scale_inv)


@pytest.mark.report("NVIDIA/TransformerEngine#814")
def test_delayed_scaling_trajectory_idle_steps_and_groups():
    amax = [2, 8, 1, 0.5, 0.5, 0.5, 0.5]
    state = oracle.DelayedScaling(E4M3, window=4)
    assert [float(state.step(a)) for a in amax] == [1, 224, 56, 56, 56, 56, 448]
    assert state.scale == 896 and state.scale_inv == np.float32(1) / np.float32(896)
    grouped = oracle.DelayedScaling(E4M3, window=4)
    for a in amax:
        grouped.step(a / 4, a, a / 2)
    assert grouped.scale == 896
    latest = oracle.DelayedScaling(E4M3, window=4, compute="most_recent")
    assert [float(latest.step(a)) for a in amax] == [1, 224, 56, 448, 896, 896, 896]


@pytest.mark.parametrize("arguments, multiple", [
    (("bf16",), 1), (("fp8_current",), 16), (("mxfp8",), 32), (("fp8_current", 2), 16), (("fp8_current", 2, 1, True), 32),
    (("bf16", 1, 2), 4), (("fp8_block", 2, 4, True), 256)])  # fmt: skip
def test_a_row_that_needs_no_padding_has_a_multiple_of_what_the_gemm_and_the_ranks_take(arguments, multiple):
    assert token_multiple(*arguments) == multiple


def test_no_rank_at_all_has_no_multiple():
    with pytest.raises(ValueError, match="tp=0, cp=1: at least one rank"):
        token_multiple("fp8_current", tp=0)
