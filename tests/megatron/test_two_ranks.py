"""Two gloo processes: tensor parallelism and FSDP2 give the single-process run. One job runs once for all tests here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "two_ranks.py"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("two_ranks") / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER), str(path)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[:6000]
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", ["fp32", "tied"])
def test_two_tensor_parallel_ranks_train_like_one_process(found, case):
    """SwiGLU's fc1 is split gate by gate and up by up: without that, the first loss already differs."""
    run = found[case]
    assert run["split"] == pytest.approx(run["whole"], abs=1e-5)
    assert run["worst_parameter"] < 1e-4
    assert run["whole"][2] < run["whole"][0]


def test_fp8_under_tensor_parallelism_differs_by_rounding_only(found):
    """Each rank scales its own shard of a weight."""
    assert found["fp8"]["split"] == pytest.approx(found["fp8"]["whole"], rel=5e-3)


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_delayed"])
def test_norms_fused_into_split_layers_change_no_bit(found, precision):
    """The gradient of the normed tensor is added up over the ranks before it reaches the norm."""
    run = found["fused"][precision]
    assert run["norm"] == "LayerNormColumnParallelLinear"
    assert run["fused"] == run["separate"] and run["different"] == []


def test_a_checkpoint_of_two_ranks_holds_the_tensors_of_one(found):
    for case in ("fp32", "tied"):
        assert found[case]["misplaced"] == [] and found[case]["parts"] > 10


def test_fsdp2_trains_like_one_process(found):
    """Built without storage, sharded, then filled: every rank takes its own part of the same weights."""
    assert found["fsdp2"]["sharded"]
    assert found["fsdp2"]["split"] == pytest.approx(found["fsdp2"]["whole"], abs=1e-5)


def test_importing_the_plugin_changes_nothing_in_megatron(found):
    assert found["callables"] > 1000 and found["changed_in_megatron"] == []


def test_a_job_too_small_for_its_splits_is_refused_with_the_number_to_start(found):
    assert "start a multiple of 3" in found["refusals"]["indivisible"]
