"""kernel="auto" that measures: with kernels, a GPU and a clock that do not exist, so that every answer is known."""

import json
import multiprocessing
import os
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest

from te_plugin.plan import (
    Kernel,
    PlanError,
    Supported,
    Target,
    Unsupported,
    forget_plans,
    plan,
    register,
    remember,
    set_tuner,
    unregister,
)
from te_plugin.tuning import Store, Tuner, cache_path, describe

OP = "tuning_test"
GPU = Target("sm90", "torch", local=True)
MADE_WITH = {"gpu": "Test GPU", "library": "abc", "driver": "1"}


@dataclass(frozen=True)
class Problem:
    op: ClassVar[str] = OP
    size: int = 8


class Clock:
    """Stands in for a GPU: the seconds it was told, and the problems it was asked."""

    def __init__(self, **seconds: float):
        self.seconds, self.asked = seconds, []

    def __call__(self, problem, plans):
        self.asked.append((problem, tuple(p.kernel.name for p in plans)))
        return {p.kernel.name: self.seconds[p.kernel.name] for p in plans}


@pytest.fixture(autouse=True)
def kernels():
    small = lambda problem, target: Supported("small") if problem.size < 100 else Unsupported("too large")  # noqa: E731
    yes = lambda problem, target: Supported()  # noqa: E731
    register(Kernel("first", OP, yes, measured=True))
    register(Kernel("plain", OP, yes))
    register(Kernel("second", OP, small, measured=True))
    register(Kernel("composite", OP, yes, composite=True))
    yield
    set_tuner(None)
    for name in ("first", "plain", "second", "composite"):
        unregister(OP, name)


def tuner(path, clock, made_with=MADE_WITH, **options):
    made = Tuner(clock, Store(path, made_with), "torch", **options)
    set_tuner(made)
    return made


@pytest.fixture
def path(tmp_path):
    return cache_path("Test GPU-80GB", tmp_path / "tuning")


def test_the_faster_kernel_is_taken_and_the_plan_says_by_how_much(path):
    clock = Clock(first=412e-6, second=388e-6)
    tuner(path, clock)
    for _ in range(3):
        made = plan(Problem(), GPU)
    assert made.kernel.name == "second" and made.note == "small; measured: 0.388 ms" and not made.provisional
    assert dict(made.rejected) == {"first": "first: 0.412 ms, second took 0.388 ms", "plain": "second comes first",
                                   "composite": "second comes first"}
    assert clock.asked == [(Problem(), ("first", "second"))]


def test_a_difference_within_the_margin_leaves_the_order(path):
    tuner(path, Clock(first=100e-6, second=99e-6))
    made = plan(Problem(), GPU)
    assert made.kernel.name == "first"
    assert "second: 0.099 ms, first took 0.100 ms and comes first" in dict(made.rejected)["second"]


def test_without_a_tuner_the_order_decides_and_elsewhere_the_note_says_what_a_gpu_would_do(path):
    assert plan(Problem(), GPU).kernel.name == "first"
    assert dict(plan(Problem(), GPU).rejected)["second"] == "first comes first"
    assert plan(Problem(), GPU).note == "run.tune=true measures first and second on the GPU and takes the faster"
    clock = Clock(first=2, second=1)
    tuner(path, clock)
    elsewhere = plan(Problem(), "sm90")
    assert elsewhere.kernel.name == "first" and not clock.asked
    assert elsewhere.note == "run.tune=true measures first and second on the GPU and takes the faster"
    assert plan(Problem(), Target("cpu", "torch", local=True)).kernel.name == "first" and not clock.asked


def test_one_able_kernel_a_forced_one_and_another_framework_are_never_measured(path):
    clock = Clock(first=2, second=1)
    tuner(path, clock)
    assert plan(Problem(100), GPU).kernel.name == "first"
    assert plan(Problem(), GPU, kernel="first").kernel.name == "first"
    with pytest.raises(PlanError, match="too large"):
        plan(Problem(100), GPU, kernel="second")
    assert plan(Problem(), Target("sm90", "jax", local=True)).kernel.name == "first"
    assert not clock.asked and not path.exists()


def _in_another_process(path, queue):
    clock = Clock()  # knows no time: asking it is an error
    tuner(path, clock)
    queue.put((plan(Problem(), GPU).kernel.name, os.getpid()))


def test_another_process_reads_the_choice(path):
    tuner(path, Clock(first=2e-3, second=1e-3))
    plan(Problem(), GPU)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_another_process, args=(path, queue))
    child.start()
    name, pid = queue.get(timeout=60)
    child.join()
    assert name == "second" and pid != os.getpid() and child.exitcode == 0


def test_what_another_process_measured_meanwhile_is_taken_over(path):
    """The rank that waited for the lock reads what the first one wrote; its own clock would have said otherwise."""
    late_clock = Clock(first=1e-3, second=2e-3)
    late = Tuner(late_clock, Store(path, MADE_WITH), "torch")
    assert late.choices() == {}  # it has looked, and there was nothing
    tuner(path, Clock(first=2e-3, second=1e-3))
    plan(Problem(), GPU)
    set_tuner(late)
    assert plan(Problem(), GPU).kernel.name == "second" and not late_clock.asked


@pytest.mark.parametrize("change", [{"library": "new"}, {"driver": "2"}, {"gpu": "Other"}, {"torch": "9"}])
def test_a_file_made_with_something_else_is_ignored_and_rewritten(path, change):
    tuner(path, Clock(first=2e-3, second=1e-3))
    plan(Problem(), GPU)
    clock = Clock(first=1e-3, second=2e-3)
    tuner(path, clock, {**MADE_WITH, **change})
    assert plan(Problem(), GPU).kernel.name == "first" and len(clock.asked) == 1
    assert json.loads(path.read_text())["made_with"] == {**MADE_WITH, **change}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 1}',
                                  '{"format": 1, "made_with": %s, "choices": {"x": "first"}}',
                                  '{"format": 1, "made_with": %s, "choices": {"x": {"first": -1}}}',
                                  '{"format": 1, "made_with": %s, "choices": {"x": {"first": 1, "first": 2}}}'])
def test_a_damaged_file_is_warned_about_and_measured_again(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("%s", json.dumps(MADE_WITH)))
    clock = Clock(first=2e-3, second=1e-3)
    tuner(path, clock)
    with pytest.warns(UserWarning, match=r"test-gpu-80gb\.json is damaged .*measured again"):
        assert plan(Problem(), GPU).kernel.name == "second"
    assert len(clock.asked) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Store(path, MADE_WITH).read() == {f"{OP}: {Problem()!r}": {"first": 2e-3, "second": 1e-3}}
    assert describe(path) == "1 products, made with driver 1, gpu Test GPU, library abc"


def test_a_folder_that_cannot_be_written_is_warned_about_and_the_choice_is_kept_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    clock = Clock(first=2e-3, second=1e-3)
    tuner(tmp_path / "file" / "gpu.json", clock)
    with pytest.warns(UserWarning, match="cannot be"):
        assert plan(Problem(), GPU).kernel.name == "second"
    forget_plans()
    assert plan(Problem(), GPU).kernel.name == "second" and len(clock.asked) == 1


def test_a_choice_between_fewer_kernels_does_not_answer_for_more(path):
    Store(path, MADE_WITH)
    path.parent.mkdir(parents=True)
    Store(path, MADE_WITH).write({f"{OP}: {Problem()!r}": {"first": 1e-3, "gone": 2e-3}})
    clock = Clock(first=2e-3, second=1e-3)
    tuner(path, clock)
    assert plan(Problem(), GPU).kernel.name == "second" and len(clock.asked) == 1


def test_while_nothing_can_be_measured_the_first_kernel_runs_and_the_plan_says_why(path):
    state = ["a CUDA graph is being captured"]
    clock = Clock(first=2e-3, second=1e-3)
    tuner(path, clock, cannot=lambda: state[0])
    made = plan(Problem(), GPU)
    assert made.kernel.name == "first" and made.provisional and not clock.asked
    assert made.note == "not measured: a CUDA graph is being captured"
    assert dict(made.rejected)["second"] == "first comes first; not measured: a CUDA graph is being captured"
    state[0] = None
    assert plan(Problem(), GPU).kernel.name == "second"  # such a plan is not remembered
    state[0] = "a CUDA graph is being captured"
    assert plan(Problem(), GPU).kernel.name == "second"  # a known choice needs no clock


def test_ranks_that_adopt_one_table_choose_alike_and_measure_nothing(path, tmp_path):
    """Every rank has a file and a clock of its own, and they disagree."""
    rank_0 = tuner(path, Clock(first=2e-3, second=1e-3))
    plan(Problem(), GPU)
    table = json.loads(json.dumps(rank_0.choices()))
    chosen = []
    for rank in range(3):
        clock = Clock(first=1e-3, second=2e-3)
        own = tuner(tmp_path / f"{rank}.json", clock)
        plan(Problem(9), GPU)
        own.adopt(table, "not foreseen")
        chosen.append([plan(Problem(size), GPU).kernel.name for size in (8, 9, 10)])
        assert len(clock.asked) == 1  # before it adopted
        assert "not foreseen" in plan(Problem(9), GPU).note and not plan(Problem(9), GPU).provisional
    assert chosen == [["second", "first", "first"]] * 3


def test_remembered_plans_are_forgotten_with_a_new_tuner(path):
    made = []

    @remember
    def remembered(size):
        made.append(size)
        return plan(Problem(size), GPU)

    assert remembered(8).kernel.name == remembered(8).kernel.name == "first" and made == [8]
    tuner(path, Clock(first=2e-3, second=1e-3))
    assert remembered(8).kernel.name == "second" and made == [8, 8]
