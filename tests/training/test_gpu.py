"""The same runs on CUDA devices: one GPU against the CPU, two GPUs (nccl) against one, and bit-equal resume."""

import json

import pytest
import torch

from te_plugin.training import read_metrics
from te_plugin.training.run import train
from tests.training.launch import run_ranks
from tests.training.small import small_config

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
# Sizes that the Hopper kernels take; framework maths is allowed, so that any CUDA device can run these tests.
SIZES = [
    "model.hidden_size=256", "model.head_dim=128", "model.ffn_hidden_size=512", "data.seq_len=512", "schedule.tokens=20480",
    "schedule.micro_rows=1", "schedule.warmup_tokens=2048", "run.fallback=allow", "schedule.eval_rows=2",
]  # fmt: skip


def gpu_config(*overrides, device="cuda"):
    return small_config(*SIZES, f"run.device={device}", *overrides)


def losses(run_dir):
    return [row["train/loss"] for row in read_metrics(run_dir)]


def largest_gap(a, b):
    return max(abs(x - y) for x, y in zip(losses(a), losses(b), strict=True))


@pytest.mark.parametrize("precision, bound", [("bf16", 0.01), ("fp8_current", 0.02), ("fp8_delayed", 0.02)])
def test_a_gpu_trains_like_the_cpu_and_resumes_bit_for_bit(tmp_path, precision, bound):
    chosen = [f"precision={precision}"]
    train(gpu_config(*chosen, device="cpu"), tmp_path / "cpu")
    assert train(gpu_config(*chosen), tmp_path / "gpu").status == "PASS"
    assert largest_gap(tmp_path / "cpu", tmp_path / "gpu") < bound
    split = tmp_path / "split"
    train(gpu_config(*chosen, "schedule.stop_after_steps=4"), split)
    train(gpu_config(*chosen, "run.resume=true", f"run.dir={split}"), split)
    assert losses(split) == losses(tmp_path / "gpu")
    rows = read_metrics(tmp_path / "gpu")
    assert rows[-1]["mem/peak_alloc_gib"] > 0
    environment = json.loads((tmp_path / "gpu" / "env.json").read_text())
    assert environment["device"] == "cuda" and environment["gpus"]


def _rank_runs(jobs):
    return [train(gpu_config(*overrides), run_dir).status for overrides, run_dir in jobs]


@pytest.mark.multigpu
@two_gpus
@pytest.mark.parametrize("precision, bound", [("bf16", 0.005), ("fp8_current", 0.01)])
def test_two_gpus_train_like_one_with_ddp_and_fsdp2(tmp_path, precision, bound):
    base = [f"precision={precision}"]
    train(gpu_config(*base), tmp_path / "one")
    kept = ["precision.keep_transpose=false"] if precision != "bf16" else []
    jobs = [
        ([*base, "parallel=ddp"], str(tmp_path / "ddp")),
        ([*base, *kept, "parallel=fsdp2"], str(tmp_path / "fsdp2")),
    ]
    assert run_ranks(2, _rank_runs, jobs, backend="cpu:gloo,cuda:nccl") == [["PASS", "PASS"]] * 2
    for name in ("ddp", "fsdp2"):
        assert largest_gap(tmp_path / "one", tmp_path / name) < bound
