"""RMSNorm and SwiGLU with FP8 output: what the fused kernel refuses, and that it gives the bytes of the two separate kernels."""

from dataclasses import replace

import pytest
import torch

from te_plugin.numerics import GRANULARITIES
from te_plugin.ops.activation_quantize.problem import ActivationQuantizeProblem
from te_plugin.ops.norm_quantize.problem import NormQuantizeProblem
from te_plugin.ops.quantize.problem import QuantizeProblem
from te_plugin.plan import PlanError, Target, plan
from te_plugin.torch.fused_quantize import FusedOptions, dswiglu_quantize, norm_quantize, swiglu_quantize
from te_plugin.torch.pointwise import rms_norm, swiglu
from te_plugin.torch.quantize import QuantizeOptions, quantize_2d

TORCH_SM90 = Target("sm90", "torch")
NORM, SWIGLU = NormQuantizeProblem(QuantizeProblem(8192, 4096)), ActivationQuantizeProblem(QuantizeProblem(8192, 14336))
GRADIENT = ActivationQuantizeProblem(QuantizeProblem(8192, 2 * 14336), gradient=True)

REFUSALS = [
    (NORM, "cpu", {}, "runs on sm90, not on cpu"),
    (NORM, "sm90", {"dtype": "fp32"}, "takes bf16, not fp32"),
    (SWIGLU, "sm90", {"dtype": "fp16"}, "takes bf16, not fp16"),
    (GRADIENT, "sm90", {"format": "e5m2", "granularity": "row"}, "writes e5m2 with one scale a tensor only, not per row"),
    (NORM, "sm90", {"columns": 4100}, "4100 columns are not a multiple of 8"),
    (NORM, "sm90", {"columns": 16392}, "takes rows of at most 16384 values, not 16392"),
    (SWIGLU, "sm90", {"columns": 14340}, "14340 columns are not a multiple of 8"),
    (GRADIENT, "sm90", {"columns": 2 * 14344}, "14344 columns are not a multiple of it"),
]


def recast(problem, **change):
    return replace(problem, cast=replace(problem.cast, **change))


@pytest.mark.parametrize("problem,arch,change,reason", REFUSALS, ids=lambda value: str(value)[:40])
def test_what_the_fused_kernel_cannot_take_is_said_and_goes_to_the_separate_kernels(problem, arch, change, reason):
    problem = recast(problem, **change)
    target = Target(arch, "torch")
    made = plan(problem, target)
    assert made.kernel.name == "separate" and not made.is_fallback
    assert reason in dict(made.rejected)["sm90"]
    with pytest.raises(PlanError, match="kernel 'sm90' cannot run this"):
        plan(problem, target, kernel="sm90")


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("problem", [NORM, SWIGLU, GRADIENT], ids=["norm", "swiglu", "dswiglu"])
def test_hopper_takes_the_fused_kernel_for_every_granularity(problem, granularity):
    made = plan(recast(problem, granularity=granularity, transpose=True), TORCH_SM90)
    assert made.kernel.name == "sm90"
    assert dict(made.rejected)["separate"] == "sm90 comes first"
    stage = "backward" if problem.op == "activation_quantize" and problem.gradient else "forward"
    assert stage in made.kernel.entry_points


def test_the_separate_kernels_are_named_and_jax_is_refused():
    assert plan(NORM, Target("cpu", "torch")).note == "one after the other: norm cpu, quantize cpu"
    with pytest.raises(PlanError, match="is wired for torch only"):
        plan(NORM, Target("cpu", "jax"))
    reason = "separate: has no kernel for quantize: cpu runs on cpu, not on sm100; sm90 runs on sm90, not on sm100"
    with pytest.raises(PlanError, match=reason):
        plan(NORM, Target("sm100", "torch"))
    with pytest.raises(PlanError, match="sm90: writes the OCP formats e4m3 and e5m2, not e4m3_fnuz"):
        plan(recast(NORM, format="e4m3_fnuz"), TORCH_SM90)


def test_what_makes_no_sense_is_refused_when_the_problem_is_made():
    with pytest.raises(ValueError, match="FP8 format 'e3m4' is not one of"):
        recast(NORM, format="e3m4")
    with pytest.raises(ValueError, match="a given scale is per tensor"):
        recast(SWIGLU, granularity="row", delayed=True)
    with pytest.raises(ValueError, match="eps=-1.0 must be finite"):
        NormQuantizeProblem(NORM.cast, eps=-1.0)


def draw(device, *shape, seed, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def fields(made):
    return [t for t in (made.data, made.scale_inv, made.data_t, made.scale_inv_t, made.stats) if t is not None]


def check_same_bytes(got, want):
    for one, other in zip(fields(got), fields(want), strict=True):
        assert one.dtype == other.dtype and torch.equal(*[t.reshape(-1).view(torch.uint8) for t in (one, other)])


CASTS = [
    *({"granularity": name} for name in GRANULARITIES),
    {"granularity": "tensor", "format": "e5m2"},
    {"granularity": "tensor", "delayed": True},
    {"granularity": "tensor", "format": "e5m2", "delayed": True},
    {"granularity": "row", "pow2_scale": True},
]
# (rows, columns); the last of them with whole 128-blocks nowhere but in the columns
SHAPES = [(130, 256), (64, 1024), (257, 384), (1, 128)]


def run_all(device, rows, columns, cast, transpose, kernel, dtype=torch.bfloat16):
    """The three fused casts with one kernel, and what the op and quantize give one after the other."""
    options = FusedOptions(transpose=transpose, kernel=kernel, **cast)
    alone = QuantizeOptions(transpose=transpose, **cast)
    scale = torch.tensor([3.0], device=device) if cast.get("delayed") else None
    x, w, dy = draw(device, rows, columns, seed=1, dtype=dtype), draw(device, columns, seed=2, dtype=dtype), None
    pair = (2 * draw(device, rows, 2 * columns, seed=3, dtype=dtype)).requires_grad_()
    dy = draw(device, rows, columns, seed=4, dtype=dtype)
    made, rstd, _ = norm_quantize(x, w, options, scale)
    yield made, quantize_2d(rms_norm(x, w), alone, scale)
    assert torch.isfinite(rstd).all() and rstd.shape == (rows,)
    residual = draw(device, rows, columns, seed=5, dtype=dtype)
    made, rstd, h = norm_quantize(x, w, options, scale, residual)
    assert torch.equal(h, x + residual) and torch.isfinite(rstd).all()
    yield made, quantize_2d(rms_norm(h, w), alone, scale)
    yield swiglu_quantize(pair.detach(), options, scale), quantize_2d(swiglu(pair.detach()), alone, scale)
    gradient = torch.autograd.grad(swiglu(pair), pair, dy)[0]
    yield dswiglu_quantize(dy, pair.detach(), options, scale), quantize_2d(gradient, alone, scale)


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_separate_kernels_equal_the_op_followed_by_quantize(cast, transpose, dtype):
    for shape in SHAPES:
        for got, want in run_all("cpu", *shape, cast, transpose, "separate", dtype):
            check_same_bytes(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_the_fused_kernels_give_the_bytes_of_the_separate_ones(cast, transpose):
    """auto on a Hopper GPU: it must be the fused kernel, except where that has said that it cannot."""
    for rows, columns in SHAPES:
        for kernel in ("auto", "separate"):
            for got, want in run_all("cuda", rows, columns, cast, transpose, kernel):
                check_same_bytes(got, want)
    assert plan(NormQuantizeProblem(QuantizeProblem(130, 256, **cast)), Target("sm90", "torch", local=True)).kernel.name == "sm90"


@pytest.mark.gpu
def test_views_that_start_at_an_odd_place_are_taken_too():
    flat = draw("cuda", 64 * 256 + 1, seed=6)
    x, w = flat[1:].view(64, 256), draw("cuda", 257, seed=7)[1:]
    got, *_ = norm_quantize(x, w, FusedOptions(transpose=True, kernel="sm90"))
    check_same_bytes(got, quantize_2d(rms_norm(x, w), QuantizeOptions(transpose=True)))
    got, _, h = norm_quantize(x, w, FusedOptions(transpose=True, kernel="sm90"), residual=x)
    check_same_bytes(got, quantize_2d(rms_norm(2 * x, w), QuantizeOptions(transpose=True)))
    assert torch.equal(h, 2 * x)


@pytest.mark.gpu
def test_a_nan_reaches_the_fused_scales():
    x = draw("cuda", 64, 256, seed=8)
    x[3, 5] = float("nan")
    w = draw("cuda", 256, seed=9)
    for granularity in GRANULARITIES:
        options = FusedOptions(granularity=granularity, transpose=True, kernel="sm90")
        got, *_ = norm_quantize(x, w, options)
        check_same_bytes(got, quantize_2d(rms_norm(x, w), options.cast))
        assert torch.isnan(got.stats[0])
