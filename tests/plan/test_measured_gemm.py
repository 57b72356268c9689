"""What is measured in earnest: FP8 products on a Hopper GPU, and what a run does with it."""

from types import SimpleNamespace

import pytest
import torch

from te_plugin import ffi
from te_plugin.config import ConfigError, compose
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.ops.recipe import plan_run, problems_of
from te_plugin.plan import Choice, Plan, Target, plan, set_tuner
from te_plugin.torch import linear, tuning
from te_plugin.training import kernel_choice

RIVALS = [
    GemmProblem(256, 512, 384, "e4m3", "e4m3", "tensor", "tensor"),
    GemmProblem(256, 512, 384, "e5m2", "e4m3", "tensor", "tensor"),
    GemmProblem(256, 512, 384, "e4m3", "e4m3", "row", "row"),
    GemmProblem(256, 512, 384, "e5m2", "e4m3", "tensor", "tensor", "fp32", True),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and ffi.is_built("sm90")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU with the sm90 library")


@pytest.fixture(autouse=True)
def off_again():
    yield
    set_tuner(None)


@pytest.mark.parametrize("problem", RIVALS, ids=str)
def test_fp8_products_with_two_kernels_are_measured_on_hopper_and_explain_says_so(problem):
    assert "run.tune=true measures cublaslt and sm90" in plan(problem, Target("sm90", "torch")).note
    assert "measures" not in plan(problem, "sm90", kernel="sm90").note


def test_block_scales_have_one_kernel_and_nothing_to_measure():
    problem = GemmProblem(256, 512, 384, "e4m3", "e4m3", "block_1x128", "block_128x128")
    assert plan(problem, Target("sm90", "torch")).note == ""


def test_explaining_a_recipe_for_hopper_names_the_measured_products():
    plans = plan_run(compose(["recipe=llama3_1_8b", "precision=fp8_current"], for_run=False), "sm90")
    assert "run.tune=true" in plans["linear_qkv.forward"].note and "run.tune=true" in plans["linear_fc1.wgrad"].note


def test_a_run_on_the_cpu_refuses_to_tune():
    cfg = SimpleNamespace(run=SimpleNamespace(tune=True))
    with pytest.raises(ConfigError, match="run.tune=true measures kernels on a GPU"):
        with kernel_choice.measured_kernels(cfg, SimpleNamespace(device=torch.device("cpu"), is_main=True)):
            pass


def test_a_run_without_tune_takes_the_order_whatever_the_process_did_before():
    mine = object()
    set_tuner(mine)
    cfg = SimpleNamespace(run=SimpleNamespace(tune=False))
    with kernel_choice.measured_kernels(cfg, SimpleNamespace(device=torch.device("cpu"), is_main=True)):
        assert set_tuner(None) is None
    assert set_tuner(None) is mine


@pytest.mark.parametrize("is_main", [True, False])
def test_rank_0_measures_every_fp8_product_of_the_run_and_all_ranks_take_its_choices(is_main, monkeypatch):
    """A GPU, its clock and the other ranks are stand-ins; the problems are those of the recipe."""
    cfg = compose(["recipe=llama_tiny", "precision=fp8_current"], for_run=False)
    cfg.run.tune = True
    asked, adopted = [], []

    class Stub:
        def choose(self, problem, plans: tuple[Plan, ...]):
            asked.append(problem)
            return Choice("sm90", {p.kernel.name: 1.0 for p in plans})

        def choices(self):
            return {"own": {}}

        def adopt(self, choices, reason):
            adopted.append(choices)

    def enable():
        stub = Stub()
        set_tuner(stub)
        return stub

    monkeypatch.setattr(tuning, "enable", enable)
    monkeypatch.setattr("te_plugin.torch.call.target_of", lambda device: Target("sm90", "torch", local=True))
    monkeypatch.setattr(ffi, "exports", lambda library, name: True)
    world = SimpleNamespace(device=torch.device("cuda", 0), is_main=is_main, broadcast_object=lambda value: {"of rank 0": {}})
    with kernel_choice.measured_kernels(cfg, world):
        assert adopted == [{"of rank 0": {}}]
        products = {problem for _, problem in problems_of(cfg) if problem.op == "gemm"}
        assert set(asked) == (products if is_main else set()) and products
    assert set_tuner(None) is None


def test_every_rank_hears_of_it_when_rank_0_cannot_measure(monkeypatch):
    cfg = compose(["recipe=llama_tiny", "precision=fp8_current"], for_run=False)
    cfg.run.tune = True
    monkeypatch.setattr(tuning, "enable", lambda: SimpleNamespace(choices=dict))
    monkeypatch.setattr(kernel_choice, "plan", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of memory")))
    monkeypatch.setattr("te_plugin.torch.call.target_of", lambda device: Target("sm90", "torch", local=True))
    said = []
    world = SimpleNamespace(device=torch.device("cuda", 0), is_main=True)
    world.broadcast_object = lambda value: said.append(value) or value
    with pytest.raises(ConfigError, match="measuring the kernels failed: out of memory"):
        with kernel_choice.measured_kernels(cfg, world):
            pass
    assert len(said) == 1, "the other ranks wait for one answer"
    world.is_main, world.broadcast_object = False, lambda value: said[0]
    with pytest.raises(ConfigError, match="out of memory"):
        with kernel_choice.measured_kernels(cfg, world):
            pass


def test_the_driver_is_named_by_its_own_version(tmp_path, monkeypatch):
    (tmp_path / "version").write_text("580.65.06\n")
    monkeypatch.setattr(tuning, "DRIVER_VERSION_FILE", tmp_path / "version")
    assert tuning.driver_version() == "580.65.06"


@pytest.mark.gpu
@needs_hopper
def test_a_file_names_what_it_was_made_with():
    found = tuning.made_with()
    assert set(found) == {"gpu", "sm90 library", "torch", "cuda", "driver"} and all(found.values())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("problem", RIVALS, ids=str)
def test_a_measurement_times_every_kernel(problem):
    plans = tuple(plan(problem, Target("sm90", "torch", local=True), kernel) for kernel in ("cublaslt", "sm90"))
    seconds = tuning.measure(problem, plans)
    assert set(seconds) == {"cublaslt", "sm90"} and all(0 < value < 1 for value in seconds.values())


@pytest.mark.gpu
@needs_hopper
def test_linear_takes_the_measured_kernel_but_measures_nothing_in_a_graph_capture(tmp_path, monkeypatch):
    from te_plugin import tuning as store

    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path)
    x, weight = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((256, 384), (512, 384)))
    linear(x, weight, None, "fp8_current")
    with tuning.tuned() as tuner, torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            linear(x, weight, None, "fp8_current")
        assert tuner.choices() == {}
        linear(x, weight, None, "fp8_current")
        (seconds,) = tuner.choices().values()
        assert set(seconds) == {"cublaslt", "sm90"}
        assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".lock"]
