"""A kernel is planned on this machine only where the library functions that it calls are there, its own and its helpers."""

import pytest

from te_plugin.ops.norm.problem import NormProblem
from te_plugin.plan import Kernel, PlanError, Supported, Target, plan, register, unregister

HERE, ELSEWHERE = Target("cpu", "torch", local=True), Target("cpu", "torch")
THERE = ("cpu", "rms_norm_forward")


@pytest.fixture
def kernel():
    def made(**needs) -> str:
        return register(Kernel(name="needy", op="norm", supports=lambda problem, target: Supported(), **needs)).name

    yield made
    unregister("norm", "needy")


@pytest.mark.parametrize("needs", [
    {"helpers": (THERE, ("cpu", "not_there"))},
    {"library": "cpu", "entry_points": {"forward": "not_there"}},
    {"library": "cpu", "entry_points": {"forward": THERE[1]}, "helpers": (("cpu", "not_there"),)},
], ids=["helper", "entry point", "helper of a compiled kernel"])  # fmt: skip
def test_a_function_that_is_missing_is_named(kernel, needs):
    name = kernel(**needs)
    with pytest.raises(PlanError, match=r"library 'cpu' on this machine does not export not_there; build it \(make cpu\)"):
        plan(NormProblem(4, 8), HERE, name)
    assert plan(NormProblem(4, 8), ELSEWHERE, name).kernel.name == name


def test_a_kernel_whose_functions_are_there_is_taken(kernel):
    assert plan(NormProblem(4, 8), HERE, kernel(helpers=(THERE,))).kernel.name == "needy"
