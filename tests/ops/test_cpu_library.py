"""The CPU library through its own functions: exact casts, the same bits at every instruction-set level and number of threads,
clear refusals, and the processes that fork.

That each kernel agrees with the oracle on the problem table is tested beside this file, for every kernel alike.
"""

import itertools
import multiprocessing
import threading

import numpy as np
import pytest
import torch

from te_plugin import ffi, numerics
from te_plugin.numerics import E4M3, E4M3_FNUZ, E5M2, FORMATS, GRANULARITIES, GRANULARITY_CODE

pytestmark = pytest.mark.skipif(not ffi.is_built("cpu"), reason="the CPU library is not built")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def call(name: str, *args):
    return ffi.function("cpu", name)(*args)


def levels() -> list[int]:
    """The instruction-set levels that this processor can run."""
    possible = []
    for level in (0, 1, 2):
        try:
            call("set_simd_level", level)
        except ValueError:
            break
        possible.append(level)
    call("set_simd_level", possible[-1])
    return possible


@pytest.fixture(params=[0, 1, 2], ids=["base", "avx2", "avx512"])
def level(request):
    known = levels()
    if request.param not in known:
        pytest.skip("this processor lacks the instruction set")
    call("set_simd_level", request.param)
    yield request.param
    call("set_simd_level", known[-1])


@pytest.fixture
def threads():
    before = call("get_num_threads")
    yield lambda n: call("set_num_threads", n)
    call("set_num_threads", before)


def scale_shape(rows: int, cols: int, granularity: str) -> tuple[int, ...]:
    down, across = -(-rows // 128), -(-cols // 128)
    return {"tensor": (1,), "row": (rows,), "block_1x128": (rows, across), "block_128x128": (down, across),
            "mx": (rows, -(-cols // 32))}[granularity]  # fmt: skip


def quantize(x: torch.Tensor, fmt=E4M3, granularity="tensor", pow2=False):
    """(data, scale_inv, data_t, scale_inv_t, stats) as NumPy; outputs start as garbage."""
    rows, cols = x.shape
    kind = np.uint8 if granularity == "mx" else np.float32
    data, data_t = np.full((rows, cols), 0xA5, np.uint8), np.full((cols, rows), 0xA5, np.uint8)
    scale_inv = np.full(scale_shape(rows, cols, granularity), 99, kind)
    scale_inv_t = np.full(scale_shape(cols, rows, granularity), 99, kind)
    stats = np.full(2, np.nan, np.float32)
    call("quantize_transpose", x, data, scale_inv, data_t, scale_inv_t, stats, GRANULARITY_CODE[granularity], fmt.code, int(pow2))
    return data, scale_inv, data_t, scale_inv_t, stats


def quantize_with_scale(x: torch.Tensor, scale: float, fmt=E4M3):
    data, scale_inv, stats = np.full(x.shape, 0xA5, np.uint8), np.zeros(1, np.float32), np.zeros(2, np.float32)
    call("quantize_with_scale", x, np.array([scale], np.float32), data, scale_inv, stats, fmt.code)
    return data, scale_inv, stats


def dequantize(data: np.ndarray, scale_inv: np.ndarray, fmt=E4M3, granularity="tensor", dtype=torch.float32) -> torch.Tensor:
    y = torch.full(data.shape, float("nan"), dtype=dtype)
    call("dequantize", data, scale_inv, y, GRANULARITY_CODE[granularity], fmt.code)
    return y


# Casts, exhaustively --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_16_bit_value_is_cast_as_numerics_says(level, fmt, dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(DTYPES[dtype]).reshape(256, 256)
    wide = x.float().numpy()
    for scale in (1.0, 0.7310586, 3e5, 2.0**-40):
        data, scale_inv, stats = quantize_with_scale(x, scale, fmt)
        with np.errstate(all="ignore"):
            product = wide * np.float32(scale)
        np.testing.assert_array_equal(data, fmt.encode(product))
        assert scale_inv[0] == np.float32(1) / np.float32(scale)
        assert np.isnan(stats[0]) and stats[1] == np.count_nonzero(~np.isfinite(wide))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_fp32_values_around_every_rounding_point_are_cast_to_nearest_even(level, fmt):
    magnitudes = np.unique(np.abs(fmt.decode(np.arange(256, dtype=np.uint8))))
    magnitudes = magnitudes[np.isfinite(magnitudes)].astype(np.float32)
    middle = ((magnitudes[:-1].astype(np.float64) + magnitudes[1:]) / 2).astype(np.float32)
    top = np.float32(
        [fmt.max, np.nextafter(np.float32(fmt.max), np.float32(np.inf)), fmt.max * 1.0625, fmt.max * 2, 3e38, np.inf]
    )
    points = np.concatenate([magnitudes, middle, top, np.float32([1e-45, 1e-38, np.nan])])
    near = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    x = np.concatenate([near, -near])[None]
    data, _, _ = quantize_with_scale(torch.from_numpy(x.copy()), 1.0, fmt)
    np.testing.assert_array_equal(data, fmt.encode(x))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_code_is_decoded_and_multiplied_once(level, fmt):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    for scale in (1.0, 0.3, 2.0**-126, 3e38):
        with np.errstate(over="ignore", invalid="ignore"):
            want = fmt.decode(codes) * np.float32(scale)
        got = dequantize(codes, np.float32([scale]), fmt)
        np.testing.assert_array_equal(got.numpy(), want)
        np.testing.assert_array_equal(np.signbit(got.numpy()[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))
        half = dequantize(codes, np.float32([scale]), fmt, dtype=torch.bfloat16)
        assert torch.equal(half.nan_to_num(7), torch.from_numpy(want).bfloat16().nan_to_num(7))


def test_e8m0_scales_of_all_256_exponents_are_decoded(level):
    exponents = np.arange(256, dtype=np.uint8)
    data = np.repeat(E4M3.encode(np.ones((1, 256 * 32), np.float32)), 1, axis=0)
    got = dequantize(data, exponents[None], E4M3, "mx").numpy().reshape(256, 32)
    np.testing.assert_array_equal(got, np.repeat(numerics.E8M0.decode(exponents)[:, None], 32, axis=1))


# Scales ---------------------------------------------------------------------------------------------------------------------


def reference(x: np.ndarray, fmt, granularity: str, pow2: bool):
    """data and scale_inv by numerics.py alone."""
    rows, cols = x.shape
    height, width = {"tensor": (rows, cols), "row": (1, cols), "block_1x128": (1, 128), "block_128x128": (128, 128),
                     "mx": (1, 32)}[granularity]  # fmt: skip
    amax = np.array(
        [[np.abs(x[r : r + height, c : c + width]).max() for c in range(0, cols, width)] for r in range(0, rows, height)]
    )
    scale, scale_inv = numerics.scale_from_amax(amax, fmt, pow2 or granularity == "mx")
    spread = np.repeat(np.repeat(scale, height, 0)[:rows], width, 1)[:, :cols]
    with np.errstate(all="ignore"):
        data = fmt.encode((x * spread).astype(np.float32))
    shaped = scale_inv.reshape(scale_shape(rows, cols, granularity))
    return data, numerics.E8M0.encode(shaped) if granularity == "mx" else shaped


def special(kind: str, shape, rng) -> np.ndarray:
    x = rng.standard_normal(shape).astype(np.float32)
    rows, cols = shape
    if kind == "nonfinite":
        x[rows // 2, cols // 2], x[0, cols - 1], x[rows - 1, 0] = np.nan, np.inf, -np.inf
    if kind == "zeros":
        x[rows // 2] = 0
        x[:, : cols // 2] = -0.0
    if kind == "denormal":
        x *= np.float32(1e-41)
    if kind == "huge":
        with np.errstate(over="ignore"):
            x *= np.float32(1e38)
    if kind == "spread":
        x *= np.exp(rng.uniform(-60, 60, shape)).astype(np.float32)
    return x


@pytest.mark.parametrize("shape", [(1, 1), (1, 127), (127, 129), (129, 1), (128, 256), (33, 300)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_and_data_are_bit_equal_to_numerics_on_special_values(level, granularity, shape, rng):
    kinds = ("normal", "nonfinite", "zeros", "denormal", "huge", "spread")
    for kind, dtype, pow2 in itertools.product(kinds, DTYPES, (False, True)):
        fmt = list(FORMATS.values())[rng.integers(4)]
        x = torch.from_numpy(special(kind, shape, rng)).to(DTYPES[dtype])
        wide = x.float().numpy()
        data, scale_inv, data_t, scale_inv_t, stats = quantize(x, fmt, granularity, pow2)
        label = f"{kind} {dtype} {fmt.name} pow2={pow2}"
        for got, want in zip((data, scale_inv), reference(wide, fmt, granularity, pow2), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=label)
        for got, want in zip((data_t, scale_inv_t), reference(wide.T, fmt, granularity, pow2), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=label + " transposed")
        np.testing.assert_array_equal(
            stats, np.float32([np.abs(wide).max(), np.count_nonzero(~np.isfinite(wide))]), err_msg=label
        )


def test_a_power_of_two_scale_is_rounded_up_just_above_the_maximum():
    for amax, exponent in ((448.0, 127), (np.nextafter(np.float32(448), np.float32(449)), 128), (449.0, 128), (224.0, 126)):
        x = torch.zeros(1, 32)
        x[0, 5] = float(amax)
        assert quantize(x, E4M3, "mx")[1][0, 0] == exponent


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty_tensors_are_legal(granularity):
    for shape in ((0, 64), (64, 0), (0, 0)):
        data, scale_inv, data_t, scale_inv_t, stats = quantize(torch.empty(shape, dtype=torch.bfloat16), E4M3, granularity)
        assert data.shape == shape and data_t.shape == shape[::-1] and stats.tolist() == [0, 0]
        if granularity in ("tensor", "row"):
            assert (scale_inv == 1).all() and (scale_inv_t == 1).all()
        dequantize(data, scale_inv, E4M3, granularity)


# Public reports on FP8 casts -----------------------------------------------------------------------------------------------


@pytest.mark.report("pytorch/ao#1912")
def test_casts_saturate_and_keep_nan(level):
    x = torch.tensor([[448, 449, 465, 480, 500, 1000, -1000, float("inf"), -float("inf"), float("nan"), 2**-9, 2**-10, 2**-11]])
    got = E4M3.decode(quantize_with_scale(x, 1.0)[0])[0]
    assert got[:6].tolist() == [448] * 6
    assert got[6:9].tolist() == [-448, 448, -448] and np.isnan(got[9])
    assert got[10:].tolist() == [2.0**-9, 0, 0]
    got = E5M2.decode(quantize_with_scale(torch.tensor([[60000.0, 61440, 65536, -65536, float("nan")]]), 1.0, E5M2)[0])[0]
    assert got[:4].tolist() == [57344, 57344, 57344, -57344] and np.isnan(got[4])


@pytest.mark.report("ROCm/TransformerEngine#143")
def test_the_two_e4m3_variants_are_never_mixed_up():
    assert numerics.fp8_max("gfx942") == 240 and numerics.fp8_max("gfx950") == 448 and numerics.fp8_max("sm90") == 448
    codes, one = np.uint8([[0x38, 0x7E, 0x80, 0x7F]]), np.float32([1])
    ocp, fnuz = dequantize(codes, one, E4M3)[0], dequantize(codes, one, E4M3_FNUZ)[0]
    assert ocp[:3].tolist() == [1, 448, 0] and torch.signbit(ocp[2]) and ocp[3].isnan()
    assert fnuz[:2].tolist() == [0.5, 224] and fnuz[2].isnan() and fnuz[3] == 240
    tensor = torch.zeros(2, 4, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="data is a float8 tensor of another kind than format e4m3_fnuz"):
        call("dequantize", tensor, one, torch.empty(2, 4), 0, E4M3_FNUZ.code)
    with pytest.raises(ValueError, match="data is a float8 tensor of another kind than format e4m3_fnuz"):
        call("quantize", torch.ones(2, 4), tensor, np.zeros(1, np.float32), np.zeros(2, np.float32), 0, E4M3_FNUZ.code, 0)


# The same bits everywhere ---------------------------------------------------------------------------------------------------


def everything(rng) -> dict[str, torch.Tensor]:
    """Outputs of every function but the attention's on one set of random inputs."""
    tensor = lambda *shape, dtype=torch.bfloat16: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)  # noqa: E731
    nan = lambda *shape, dtype=torch.bfloat16: torch.full(shape, float("nan"), dtype=dtype)  # noqa: E731
    out = {}
    x, dy, w = tensor(389, 301), tensor(389, 301), tensor(301)
    y, dx, rstd, dw = nan(389, 301), nan(389, 301), nan(389, dtype=torch.float32), nan(301, dtype=torch.float32)
    call("rms_norm_forward", x, w, y, rstd, 1e-5)
    call("rms_norm_backward", dy, x, w, rstd, dx, dw)
    out |= {"norm y": y, "norm rstd": rstd, "norm dx": dx, "norm dw": dw}
    y, h, dx = nan(389, 301), nan(389, 301), nan(389, 301)
    call("rms_norm_residual_forward", x, dy, w, y, h, torch.empty_like(rstd), 1e-5)
    call("rms_norm_residual_backward", dy, x, h, w, rstd, dx, torch.empty_like(dw))
    out |= {"norm of a sum": y, "sum": h, "dx of a sum": dx}
    gate_up = tensor(389, 602)
    y, dx = nan(389, 301), nan(389, 602)
    call("swiglu_forward", gate_up, y)
    call("swiglu_backward", dy, gate_up, dx)
    out |= {"swiglu y": y, "swiglu dx": dx}
    heads, positions = tensor(300, 3, 40), torch.from_numpy(rng.integers(0, 131072, 300).astype(np.int32))
    turned = nan(300, 3, 40)
    call("rope", heads, positions, torch.from_numpy(10000.0 ** (-np.arange(20, dtype=np.float32) / 20)), turned, 0)
    out["rope"] = turned
    labels = torch.from_numpy(rng.integers(0, 301, 389).astype(np.int32))
    loss, lse, dlogits = nan(389, dtype=torch.float32), nan(389, dtype=torch.float32), nan(389, 301)
    call("cross_entropy_forward", x, labels, loss, lse)
    call("cross_entropy_backward", tensor(389, dtype=torch.float32), x, labels, lse, dlogits)
    out |= {"loss": loss, "lse": lse, "dlogits": dlogits}
    for granularity in GRANULARITIES:
        for name, value in zip("abcde", quantize(x, E4M3, granularity), strict=True):
            out[f"quantize {granularity} {name}"] = torch.from_numpy(value)
    return out


def grouped(rng) -> dict[str, torch.Tensor]:
    a = torch.from_numpy(rng.standard_normal((500, 130)).astype(np.float32))
    b = torch.from_numpy(rng.standard_normal((4, 201, 130)).astype(np.float32))
    sizes, y, dw = torch.tensor([100, 0, 257, 40]), torch.full((500, 201), float("nan")), torch.full((4, 201, 130), float("nan"))
    call("grouped_gemm", a, b, sizes, y)
    call("grouped_gemm_wgrad", y, a, sizes, dw, 0)
    return {"grouped y": y, "grouped dw": dw}


def assert_equal(a: dict, b: dict, what: str) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs between {what}"


def test_results_do_not_depend_on_the_number_of_threads(threads):
    results = []
    for n in (1, 2, 3, 7):
        threads(n)
        results.append(everything(np.random.default_rng(5)) | grouped(np.random.default_rng(6)))
    for other in results[1:]:
        assert_equal(results[0], other, "1 and more threads")


def test_results_do_not_depend_on_the_instruction_set(level):
    got = everything(np.random.default_rng(5))
    call("set_simd_level", 0)
    assert_equal(everything(np.random.default_rng(5)), got, f"level 0 and level {level}")


# Threads and processes ------------------------------------------------------------------------------------------------------


def _norm_in_child(queue) -> None:
    x, rstd = torch.ones(4096, 64), torch.zeros(4096)
    call("rms_norm_forward", x, torch.ones(64), torch.empty_like(x), rstd, 0.0)
    queue.put(rstd.sum().item())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.report("ashvardanian/NumKong#328")
@pytest.mark.parametrize("rows", [1, 4096], ids=["caller", "pool"])
def test_a_caller_that_flushes_subnormals_changes_no_bit_and_keeps_its_mode(rows):
    """torch.set_flush_denormal does, and so do the threads of XLA; threads that a caller starts inherit it."""
    x = torch.full((rows, 512), 1e-39)
    arguments = GRANULARITY_CODE["row"], E4M3.code, 0

    def quantised():
        data, scale_inv, stats = torch.empty(x.shape, dtype=torch.uint8), torch.empty(rows), torch.empty(2)
        call("quantize", x, data, scale_inv, stats, *arguments)
        return data, scale_inv.view(torch.int32), stats.view(torch.int32)

    expected = quantised()
    assert expected[0].all() and expected[1].all()
    assert torch.set_flush_denormal(True)
    try:
        found = quantised()
        assert torch.tensor([1e-39]).mul(1).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_forked_child_can_compute_after_its_parent_did(threads):
    threads(2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    _norm_in_child(queue)  # the parent's pool is running now
    assert queue.get(timeout=30) == 4096
    children = [context.Process(target=_norm_in_child, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    try:
        assert [queue.get(timeout=60) for _ in children] == [4096, 4096]
    finally:
        for child in children:
            child.join(timeout=10)
            if child.is_alive():
                child.kill()
    _norm_in_child(queue)
    assert queue.get(timeout=30) == 4096


def test_several_python_threads_may_call_at_once(threads, rng):
    threads(2)
    inputs = [torch.from_numpy(rng.standard_normal((300, 256)).astype(np.float32)) for _ in range(4)]
    alone = [quantize(x, E4M3, "row") for x in inputs]
    wrong = []

    def work(i: int) -> None:
        for _ in range(20):
            if any(not np.array_equal(a, b) for a, b in zip(alone[i], quantize(inputs[i], E4M3, "row"), strict=True)):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_build_info_and_thread_count_are_told(threads):
    threads(3)
    assert call("get_num_threads") == 3
    assert call("build_info").startswith("cpu library, ") and "3 threads" in call("build_info")
    for wrong in (0, -1, 100000):
        with pytest.raises(ValueError, match=f"threads is {wrong}; expected 1 to 1024"):
            call("set_num_threads", wrong)
