"""Quantisation of every registered kernel is bit-equal to the oracle: codes, scales, transposed copies and statistics."""

import numpy as np
import pytest
import torch

from te_plugin import numerics, oracle
from te_plugin.numerics import FORMATS, GRANULARITIES
from te_plugin.ops.quantize.problem import QuantizeProblem, scale_shape

from .reference import rounded
from .runners import implementations, nan_filled_memory, nan_tensor, parameter, to_torch

SHAPES = [(1, 1), (1, 128), (3, 127), (129, 33), (128, 256), (257, 5), (64, 160), (130, 260), (0, 64), (31, 96)]
VALUES = ("normal", "wide", "zeros", "nonfinite", "tiny")


def make(values: str, shape, rng) -> np.ndarray:
    x = rng.standard_normal(shape)
    if values == "wide":
        x = x * 10.0 ** rng.uniform(-6, 6, shape)
    if values == "tiny":
        x = x * 10.0 ** rng.uniform(-44, -36, shape)
    if values == "zeros":
        x[:, : shape[1] // 2] = 0
        x[::2] = 0
    if values == "nonfinite" and x.size:
        for value in (np.nan, np.inf, -np.inf):
            x[rng.integers(shape[0]), rng.integers(shape[1])] = value
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def raw(implementation, problem: QuantizeProblem, x: np.ndarray, scale):
    """(data, scale_inv, data_t, scale_inv_t, stats); x has strided rows, every output starts as 0xFF or NaN."""
    runner = implementation.runner
    chosen = runner.plan(problem, implementation.kernel.name)
    wide = nan_tensor((x.shape[0], x.shape[1] + 3), problem.dtype, runner.device)
    wide[:, : x.shape[1]] = to_torch(x, problem.dtype, runner.device)
    strided = wide[:, : x.shape[1]]
    scale_dtype = "uint8" if problem.granularity == "mx" else "fp32"
    outputs = [nan_tensor(x.shape, problem.format, runner.device)]
    scales = [nan_tensor(problem.scale_shape(), scale_dtype, runner.device)]
    if problem.transpose:
        outputs.append(nan_tensor(x.shape[::-1], problem.format, runner.device))
        if not problem.delayed:
            scales.append(nan_tensor(scale_shape(problem.columns, problem.rows, problem.granularity), scale_dtype, runner.device))
    stats = nan_tensor((2,), "fp32", runner.device)
    stage = {(0, 0): "plain", (0, 1): "transpose", (1, 0): "given", (1, 1): "given_transpose"}[
        (problem.delayed, problem.transpose)
    ]
    if problem.delayed:
        tensors = [strided, to_torch(np.array([scale]), "fp32", runner.device), *outputs, *scales, stats]
    else:
        tensors = [strided, *(t for pair in zip(outputs, scales, strict=True) for t in pair), stats]
    runner.call(chosen, stage, tensors, chosen.attributes)
    return outputs[0], scales[0], *((outputs[1], scales[-1]) if problem.transpose else (None, None)), stats


def through_torch(implementation, problem: QuantizeProblem, x: np.ndarray, scale):
    from te_plugin.torch.quantize import QuantizeOptions, quantize_2d

    device = implementation.runner.device
    options = QuantizeOptions(problem.format, problem.granularity, problem.pow2_scale, problem.transpose, problem.delayed,
                              implementation.kernel.name, "allow")  # fmt: skip
    given = None if scale is None else to_torch(np.array([scale]), "fp32", device)
    with nan_filled_memory():
        made = quantize_2d(to_torch(x, problem.dtype, device), options, given)
    return made.data, made.scale_inv, made.data_t, made.scale_inv_t, made.stats


RUN = {"raw": raw, "torch": through_torch}
IMPLEMENTATIONS = [i for i in implementations("quantize", QuantizeProblem(1, 1)) if i.runner.name in RUN]


def host(x: torch.Tensor) -> np.ndarray:
    return x.cpu().view(torch.uint8).numpy() if x.element_size() == 1 else x.cpu().numpy()


def check(got, x: np.ndarray, problem: QuantizeProblem, scale=None) -> None:
    fmt = FORMATS[problem.format]
    x = rounded(x, problem.dtype).astype(np.float32)
    if problem.delayed:
        want = [oracle.quantize_with_scale(x, scale, fmt), oracle.quantize_with_scale(x.T, scale, fmt)]
    else:
        want = oracle.quantize_transpose(x, fmt, problem.granularity, problem.pow2_scale)
    copies = [("row-major", *got[:2], want[0])]
    if problem.transpose:
        copies.append(("transposed", *got[2:4], want[1]))
    for name, data, scale_inv, expected in copies:
        assert_same(host(scale_inv), expected.scale_inv, f"{name} scale_inv")
        assert_same(host(data), expected.data, f"{name} data")
    amax, nonfinite = oracle.amax_and_nonfinite(x)
    assert_same(host(got[4]), np.array([amax, nonfinite], dtype=np.float32), "stats (amax, non-finite values)")


def assert_same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    same = (got == want) | ((got != got) & (want != want))
    if not same.all():
        first = tuple(np.argwhere(~same)[0].tolist())
        raise AssertionError(
            f"{what}{list(first)}: got {got[first]!r}, want {want[first]!r} ({(~same).sum()} of {same.size} differ)"
        )


def problem_of(x, dtype, fmt, granularity, **options) -> QuantizeProblem:
    return QuantizeProblem(x.shape[0], x.shape[1], dtype, fmt, granularity, **options)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("implementation", [parameter(i, name="all") for i in IMPLEMENTATIONS])
def test_codes_scales_and_statistics_are_bit_equal_to_the_oracle(implementation, granularity, values, rng):
    ran = 0
    for shape in SHAPES:
        for dtype in ("fp32", "bf16", "fp16"):
            for fmt in FORMATS:
                x = make(values, shape, rng)
                pow2, transpose = bool(rng.integers(2)), bool(rng.integers(2))
                problem = problem_of(x, dtype, fmt, granularity, pow2_scale=pow2, transpose=transpose)
                if not implementation.supports(problem):
                    continue
                check(RUN[implementation.runner.name](implementation, problem, x, None), x, problem)
                ran += 1
    assert ran, "the kernel refuses this granularity altogether: it should not be registered for it"


def formats_of(implementation) -> list[str]:
    return [name for name in FORMATS if implementation.supports(QuantizeProblem(1, 1, format=name))]


GIVEN = [parameter(i, fmt, name=f"given-scale-{fmt}") for i in IMPLEMENTATIONS for fmt in formats_of(i)]


@pytest.mark.parametrize("implementation,fmt", GIVEN)
def test_a_given_scale_saturates_and_keeps_nan(implementation, fmt, rng):
    for shape in SHAPES:
        for dtype in ("fp32", "bf16"):
            for scale in (1.0, 0.37, 8960.0):
                x = make("nonfinite", shape, rng) * np.float32(300)
                problem = problem_of(x, dtype, fmt, "tensor", transpose=True, delayed=True)
                check(RUN[implementation.runner.name](implementation, problem, x, scale), x, problem, scale)


@pytest.mark.parametrize("implementation", [parameter(i, name="all-codes") for i in IMPLEMENTATIONS])
def test_every_value_near_a_rounding_boundary_rounds_to_even(implementation):
    for fmt in (FORMATS[name] for name in formats_of(implementation)):
        finite = fmt.decode(np.arange(256, dtype=np.uint8))
        finite = np.sort(finite[np.isfinite(finite)].astype(np.float64))
        middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
        x = np.concatenate([middle, np.nextafter(middle, np.float32(1e9)), np.nextafter(middle, np.float32(-1e9))])[None]
        problem = problem_of(x, "fp32", fmt.name, "tensor", delayed=True)
        check(RUN[implementation.runner.name](implementation, problem, x, 1.0), x, problem, 1.0)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_is_one_fp32_product(granularity, dtype, rng):
    from te_plugin.torch import dequantize, quantize

    for fmt in FORMATS:
        x = make("wide", (130, 161), rng)
        made = quantize(to_torch(x, "fp32"), fmt, granularity, transpose=True)
        want, want_t = (oracle.dequantize(c) for c in oracle.quantize_transpose(x, FORMATS[fmt], granularity))
        with nan_filled_memory():
            got = dequantize(made.data, made.scale_inv, granularity, fmt, dtype)
        assert torch.equal(got, torch.from_numpy(want.astype(np.float32)).to(dtype))
        assert torch.equal(made.dequantize_transpose(), torch.from_numpy(want_t.astype(np.float32)))


@pytest.mark.report("pytorch/ao#4713")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_give_zero_data_and_a_positive_scale(granularity, rng):
    from te_plugin.torch import quantize

    x = torch.from_numpy(rng.standard_normal((4, 128), dtype=np.float32))
    whole = quantize(x, "e4m3", granularity)
    x[2] = 0
    for made in (quantize(torch.zeros(4, 128), "e4m3", granularity), quantize(x, "e4m3", granularity)):
        scale = made.scale_inv.float() if granularity != "mx" else torch.exp2(made.scale_inv.float() - 127)
        assert torch.isfinite(scale).all() and (scale > 0).all()
        assert (made.dequantize()[2] == 0).all()
        if granularity in ("row", "block_1x128", "mx") and made.dequantize().any():
            kept = [0, 1, 3]
            assert torch.equal(made.dequantize()[kept], whole.dequantize()[kept])


@pytest.mark.report("pytorch/ao#1766")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_inputs_have_fp32_scales(dtype):
    from te_plugin.torch import quantize

    made = quantize(torch.tensor([[0, 0, 0.1, 0.1]], dtype=dtype), "e5m2")
    assert made.data.float().tolist() == [[0, 0, 57344, 57344]]
    assert made.scale_inv.item() == pytest.approx(float(torch.tensor(0.1, dtype=dtype)) / 57344, rel=1e-6)
    if dtype is torch.float16:
        np.testing.assert_allclose(made.dequantize().numpy(), [[0, 0, 0.09997559, 0.09997559]], rtol=1e-6)


@pytest.mark.report("pytorch/ao#1912")
def test_eager_and_compiled_casts_saturate_alike():
    from te_plugin.torch import quantize

    x = torch.tensor([[448, 449, 465, 480, 500, 1000, -1000, float("nan"), float("inf"), 2**-9, 2**-10, 2**-11]])
    cast = lambda t: quantize(t, "e4m3", amax=448.0).data.float()  # noqa: E731
    eager = cast(x)
    assert eager[0, :6].tolist() == [448] * 6 and eager[0, 6] == -448 and eager[0, 7].isnan()
    assert eager[0, 8:].tolist() == [448, 2**-9, 0, 0]
    compiled = torch.compile(cast, fullgraph=True, backend="eager")(x)
    assert torch.equal(compiled.view(torch.int32), eager.view(torch.int32))
    x = torch.tensor([[60000.0, 61440.0, 65536.0, float("inf")]])
    assert quantize(x, "e5m2", amax=57344.0).data.float().tolist() == [[57344] * 4]


@pytest.mark.report("ROCm/TransformerEngine#143")
def test_the_format_travels_with_the_tensor():
    from te_plugin.torch import quantize

    x = torch.tensor([[1.0, 240.0, -0.0]])
    ocp, fnuz = quantize(x, "e4m3", amax=448.0), quantize(x, "e4m3_fnuz", amax=240.0)
    assert ocp.data.view(torch.uint8)[0].tolist() == [0x38, 0x77, 0x80]
    assert fnuz.data.view(torch.uint8)[0].tolist() == [0x40, 0x7F, 0x00]
    assert ocp.data.dtype == torch.float8_e4m3fn and fnuz.data.dtype == torch.float8_e4m3fnuz
    assert torch.equal(ocp.dequantize(), fnuz.dequantize())


def test_wrong_names_and_shapes_are_refused_with_what_is_known():
    from te_plugin.torch import quantize

    with pytest.raises(ValueError, match="'e4m4' is not one of e4m3, e5m2"):
        quantize(torch.zeros(2, 2), "e4m4")
    with pytest.raises(ValueError, match="'e4m4' is not one of e4m3, e5m2"):
        quantize(torch.zeros(2, 2), "e4m4", amax=1.0)
    with pytest.raises(ValueError, match="'column' is not one of tensor, row"):
        quantize(torch.zeros(2, 2), "e4m3", "column")
    with pytest.raises(ValueError, match="per-tensor statistic"):
        quantize(torch.zeros(2, 2), "e4m3", "row", amax=1.0)
    with pytest.raises(ValueError, match="amax=-1.0 is negative"):
        quantize(torch.zeros(2, 2), amax=-1.0)
    with pytest.raises(ValueError, match=r"amax has shape \(2,\); one number"):
        quantize(torch.zeros(2, 2), amax=torch.ones(2))
    with pytest.raises(ValueError, match="torch.float32 or torch.bfloat16, not torch.float64"):
        quantize(torch.zeros(2, 2)).dequantize(torch.float64)
    with pytest.raises(ValueError, match="at least one dimension"):
        quantize(torch.tensor(1.0))
    assert numerics.FORMATS["e4m3"].max == 448


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_that_are_not_used_count_as_zero_whatever_they_hold(granularity, rng):
    from te_plugin.torch.quantize import QuantizeOptions, quantize_2d

    x = torch.from_numpy(rng.standard_normal((200, 96), dtype=np.float32))
    for used in (0, 1, 130, 200):
        poisoned = x.clone()
        poisoned[used:] = float("nan")
        clean = torch.where(torch.arange(200)[:, None] < used, x, 0)
        options = QuantizeOptions("e4m3", granularity, False, True)
        got, want = quantize_2d(poisoned, options, used=torch.tensor([used])), quantize_2d(clean, options)
        for name in ("data", "scale_inv", "data_t", "scale_inv_t", "stats"):
            assert torch.equal(getattr(got, name).view(torch.uint8), getattr(want, name).view(torch.uint8)), name
