"""Two and three gloo processes compute what one computes, whatever the split, and read each other's checkpoints."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from te_plugin.training import read_metrics
from te_plugin.training.checkpoint import latest
from te_plugin.training.run import train
from tests.training.launch import run_ranks
from tests.training.small import small_config


def rank_runs(jobs):
    """Each job (overrides, run_dir) is one run of all ranks; in one process start, because imports take seconds."""
    return [train(small_config(*overrides), run_dir).status for overrides, run_dir in jobs]


def losses(run_dir):
    return [row["train/loss"] for row in read_metrics(run_dir)]


def largest_gap(a, b):
    return max(abs(x - y) for x, y in zip(losses(a), losses(b), strict=True))


@pytest.mark.report("NVIDIA/Megatron-LM#2769", "pytorch/torchtitan#1136")
def test_ddp_and_fsdp2_on_two_ranks_train_as_one_process_and_exchange_checkpoints(tmp_path):
    """micro_rows=1 everywhere: the FP8 scales of a microbatch see the same rows on every split."""
    base = ["precision=fp32", "schedule.micro_rows=1"]
    one = tmp_path / "single"
    train(small_config(*base), one)
    half = ["schedule.stop_after_steps=4"]
    train(small_config(*base, *half), tmp_path / "to_ddp")
    train(small_config(*base, *half), tmp_path / "to_fsdp2")

    def job(name, parallel, *more):
        return [*base, f"parallel={parallel}", *more], str(tmp_path / name)

    def resume(name, parallel):
        return job(name, parallel, "run.resume=true", f"run.dir={tmp_path / name}")

    jobs = [
        job("ddp", "ddp"),
        job("fsdp2", "fsdp2"),
        resume("to_ddp", "ddp"),
        resume("to_fsdp2", "fsdp2"),
        job("from_ddp", "ddp", *half),
        job("from_fsdp2", "fsdp2", *half),
        job("cross", "fsdp2", *half),
        resume("cross", "ddp"),
    ]
    assert run_ranks(2, rank_runs, jobs) == [["PASS"] * len(jobs)] * 2
    for name in ("from_ddp", "from_fsdp2"):
        train(small_config(*base, "run.resume=true", f"run.dir={tmp_path / name}"), tmp_path / name)
    gaps = {
        name: largest_gap(one, tmp_path / name)
        for name in ("ddp", "fsdp2", "to_ddp", "to_fsdp2", "from_ddp", "from_fsdp2", "cross")
    }
    assert max(gaps.values()) < 2e-5, gaps
    hashes = {
        json.loads((tmp_path / name / "env.json").read_text())["init_hash"] for name in ("single", "ddp", "fsdp2")
    }
    assert len(hashes) == 1
    norms = [[row["train/grad_norm"] for row in read_metrics(tmp_path / name)] for name in ("single", "ddp", "fsdp2")]
    for other in norms[1:]:
        assert max(abs(a / b - 1) for a, b in zip(norms[0], other, strict=True)) < 1e-3
    for name in ("ddp", "fsdp2"):
        assert abs(read_metrics(tmp_path / name)[-1]["val/loss"] - read_metrics(one)[-1]["val/loss"]) < 2e-5


@pytest.mark.parametrize("size, parallel", [(2, "ddp"), (3, "fsdp2")])
def test_fp8_runs_resume_bit_for_bit_on_the_same_ranks(tmp_path, size, parallel):
    """3 ranks do not divide the vocabulary or the hidden size: uneven shards, and a prime vocabulary."""
    base = [
        f"parallel={parallel}",
        "precision=fp8_delayed",
        "precision.amax_history_len=4",
        "schedule.micro_rows=1",
        f"schedule.global_rows={2 * size}",
        f"schedule.tokens={2 * size * 128 * 8}",
        "model.vocab_size=509",
    ]
    if parallel == "fsdp2":
        base.append("precision.keep_transpose=false")
    whole, split = str(tmp_path / "whole"), str(tmp_path / "split")
    jobs = [
        (base, whole),
        ([*base, "schedule.stop_after_steps=4"], split),
        ([*base, "run.resume=true", f"run.dir={split}"], split),
    ]
    run_ranks(size, rank_runs, jobs)
    assert losses(whole) == losses(split) and len(losses(whole)) == 8
    assert latest(split).step == 8 and losses(whole)[-1] < math.log(509)


def _uneven_batches(run_dir, parallel):
    """One step in which rank 0 has 5 label tokens, rank 1 has 1 or 0; returns loss and gradient norm."""
    from te_plugin.data import Data
    from te_plugin.training import run
    from te_plugin.training.megatron_adapter import megatron_adapter

    counts = [5, 1, 4, 0]  # label tokens of rows 0 to 3

    class Masked:
        def __init__(self, data: Data):
            self.data = data

        def __getattr__(self, name):
            return getattr(self.data, name)

        def train_batch(self, first, rows):
            batch = self.data.train_batch(first, rows)
            labels = batch.labels.copy().reshape(rows, -1)
            for index in range(rows):
                labels[index, counts[(first + index) % 4] :] = -100
            return replace(batch, labels=labels.reshape(-1))

    adapter = megatron_adapter()
    adapter = replace(adapter, build_data=lambda cfg: Masked(megatron_adapter().build_data(cfg)))
    cfg = small_config("precision=fp32", "schedule.micro_rows=1", f"parallel={parallel}", "schedule.stop_after_steps=3")
    run.train(cfg, run_dir, adapter)
    return [
        (row["train/loss"], row["train/grad_norm"], row["train/label_tokens"]) for row in read_metrics(Path(run_dir))
    ]


def _uneven_jobs(folder):
    return [_uneven_batches(f"{folder}/{parallel}", parallel) for parallel in ("ddp", "fsdp2")]


@pytest.mark.report("PrimeIntellect-ai/prime-rl#1957", "pytorch/torchtitan#1842", "huggingface/transformers#35203")
def test_label_tokens_weigh_the_same_on_every_rank_and_in_every_microbatch(tmp_path):
    one = _uneven_batches(str(tmp_path / "single"), "single")
    assert [row[2] for row in one] == [10, 10, 10]
    for other in run_ranks(2, _uneven_jobs, str(tmp_path))[0]:
        for (loss, norm, tokens), (want_loss, want_norm, _) in zip(other, one, strict=True):
            assert tokens == 10 and abs(loss - want_loss) < 1e-5 and abs(norm / want_norm - 1) < 1e-4
