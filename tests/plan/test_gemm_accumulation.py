"""Fast accumulation is asked of a kernel like anything else: one can do it, every other one says why not."""

import dataclasses

import pytest

from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import Choice, PlanError, Target, plan, registered, set_tuner

SIZES = (256, 512, 384)
TENSOR = GemmProblem(*SIZES, "e4m3", "e4m3", "tensor", "tensor", accumulation="fast")
ROW = GemmProblem(*SIZES, "e4m3", "e4m3", "row", "row", accumulation="fast")
BLOCK = GemmProblem(*SIZES, "e4m3", "e4m3", "block_1x128", "block_128x128", accumulation="fast")
MX = GemmProblem(*SIZES, "e4m3", "e4m3", "mx", "mx", accumulation="fast")
PLAIN = GemmProblem(*SIZES, accumulation="fast")
HOPPER = Target("sm90", "torch")


@pytest.mark.parametrize("problem", [TENSOR, ROW], ids=["tensor", "row"])
def test_cublaslt_adds_fast_on_hopper_and_the_plan_says_so(problem):
    made = plan(problem, HOPPER)
    assert made.kernel.name == "cublaslt" and made.note == "fast accumulation"
    reasons = dict(made.rejected)
    assert set(reasons) == {"sm90", "xla", "composite"}
    assert all(reasons[name] == "adds in FP32, and accumulation=fast was asked for" for name in ("sm90", "composite"))
    assert "fast acc" not in plan(dataclasses.replace(problem, accumulation="fp32"), HOPPER).note


@pytest.mark.parametrize("problem,target,kernel,reason", [
    (TENSOR, HOPPER, "sm90", "adds in FP32"), (TENSOR, HOPPER, "composite", "adds in FP32"),
    (TENSOR, Target("cpu", "torch"), "composite", "adds in FP32"),
    (TENSOR, Target("sm100", "torch"), "cublaslt", "on sm90 only, not on sm100"),
    (TENSOR, Target("sm90", "jax"), "xla", "decides itself how its products add up"),
    (BLOCK, HOPPER, "cublaslt", "adds partial sums of block scales in FP32"),
    (MX, HOPPER, "cublaslt", "no form for scales mx"), (PLAIN, HOPPER, "cublaslt", "adds in FP32"),
])  # fmt: skip
def test_a_kernel_that_cannot_gives_its_reason(problem, target, kernel, reason):
    with pytest.raises(PlanError, match=f"kernel '{kernel}' cannot run this on {target.arch}: .*{reason}"):
        plan(problem, target, kernel)


@pytest.mark.parametrize("target", [Target("cpu", "torch"), Target("sm100", "torch"), Target("gfx950", "torch"),
                                    Target("sm90", "jax"), Target("cpu", "jax")], ids=str)  # fmt: skip
def test_where_nothing_adds_fast_framework_maths_is_no_way_out(target):
    with pytest.raises(PlanError, match="no kernel can run this") as error:
        plan(TENSOR, target, fallback="allow")
    assert all(f"\n  {kernel.name}: " in str(error.value) for kernel in registered("gemm"))
    assert "fallback" not in str(error.value)


def test_an_unknown_way_to_add_is_named():
    with pytest.raises(ValueError, match="accumulation='bf16' is not one of fp32, fast"):
        GemmProblem(*SIZES, accumulation="bf16")


def test_a_measured_choice_does_not_answer_for_the_other_way_to_add(monkeypatch):
    """Only one kernel adds fast: there is nothing to measure, and what was measured in FP32 does not apply."""
    asked = []

    class Tuner:
        def choose(self, problem, plans):
            asked.append(problem)
            return Choice("sm90", {made.kernel.name: 1.0 for made in plans})

    monkeypatch.setattr("te_plugin.ffi.exports", lambda library, name: True)
    here = Target("sm90", "torch", local=True)
    set_tuner(Tuner())
    try:
        assert plan(dataclasses.replace(TENSOR, accumulation="fp32"), here).kernel.name == "sm90"
        assert plan(TENSOR, here).kernel.name == "cublaslt"
    finally:
        set_tuner(None)
    assert [problem.accumulation for problem in asked] == ["fp32"] and repr(TENSOR) != repr(asked[0])
