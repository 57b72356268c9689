"""Batches of a step: the rows depend on the step alone, and the document mask can be taken away on purpose only."""

import json

import numpy as np
import pytest

from te_plugin.config import ConfigError
from te_plugin.convergence import Verdict, compare_runs
from te_plugin.data import build_data
from te_plugin.training import read_metrics
from te_plugin.training.distributed import check_rows
from te_plugin.training.run import train
from te_plugin.training.step import Schedule, without_document_mask


def test_rows_of_a_step_are_dealt_to_ranks_without_gap_or_overlap(small):
    """Global step s has rows s * G ...; rank r of R takes the r-th share, whatever R and the microbatch are."""
    from te_plugin.training.adapter import Adapter
    from te_plugin.training.distributed import World
    from te_plugin.training.step import Batches

    asked = []

    class Recorder:
        def train_batch(self, first, rows):
            asked.extend(range(first, first + rows))

    adapter = Adapter("none", None, None, None, None)
    for size in (1, 2, 4):
        for micro in (1, 2, 4):
            if 8 % (micro * size):
                continue
            for step in (1, 2, 7):
                asked.clear()
                for rank in range(size):
                    cfg = small("schedule.global_rows=8", f"schedule.micro_rows={micro}", "schedule.tokens=10240")
                    world = World("cpu", rank=rank, size=size, dp_rank=rank, dp_size=size)
                    Batches(cfg, Recorder(), adapter, world).step(step)
                assert asked == list(range((step - 1) * 8, step * 8))


def test_rows_that_do_not_divide_over_ranks_are_refused():
    assert check_rows(8, 2, 2) == 2
    with pytest.raises(ConfigError, match="8.*not a multiple.*micro_rows=2 \\* 3"):
        check_rows(8, 2, 3)


def test_steps_follow_from_tokens(small):
    cfg = small("schedule.stop_after_steps=3")
    assert Schedule.of(cfg) == Schedule(step_tokens=512, total_steps=10, last_step=3)


def test_without_the_mask_every_row_is_one_segment_and_nothing_else_changes(small):
    batch = build_data(small("data.seq_len=512", "schedule.tokens=20480")).train_batch(3, 2)
    damaged = without_document_mask(batch)
    assert damaged.cu_seqlens[:3].tolist() == [0, 512, 1024] and (damaged.cu_seqlens[3:] == 1024).all()
    assert (damaged.cu_seqlens == damaged.cu_seqlens_padded).all() and len(damaged.cu_seqlens) == len(batch.cu_seqlens)
    for name in ("tokens", "labels", "positions"):
        np.testing.assert_array_equal(getattr(damaged, name), getattr(batch, name))


def test_sabotage_is_loud_and_recorded(small, tmp_path, capsys):
    train(small("testing.sabotage=no_document_mask", "schedule.stop_after_steps=1"), tmp_path)
    assert "damaged on purpose" in capsys.readouterr().out
    assert json.loads((tmp_path / "env.json").read_text())["sabotage"] == "no_document_mask"


@pytest.mark.report("ISEEKYAN/Megatron-LM#149")
def test_microbatches_of_one_step_equal_one_large_microbatch(small, tmp_path):
    for micro in (1, 2, 4):
        train(small("precision=fp32", f"schedule.micro_rows={micro}"), tmp_path / str(micro))
    curves = [[r["train/loss"] for r in read_metrics(tmp_path / str(m))] for m in (1, 2, 4)]
    assert max(abs(a - b) for other in curves[1:] for a, b in zip(curves[0], other, strict=True)) < 1e-5


def test_packed_rows_and_one_document_a_row_train_the_same_model(small, tmp_path):
    train(small("precision=fp32", "layout=thd"), tmp_path / "thd")
    train(small("precision=fp32", "layout=bshd"), tmp_path / "bshd")
    found = compare_runs(tmp_path / "thd", tmp_path / "bshd", tmp_path / "out")
    assert max(map(abs, found.gap)) < 1e-5 and found.comparable
    assert found.config == {"layout.name": ("thd", "bshd")}
    assert (tmp_path / "out" / "compare.png").stat().st_size > 0
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["steps"] == 10
    assert compare_runs(tmp_path / "thd", tmp_path / "thd").to_json()["identical"]


def test_comparing_unpaired_runs_says_so_and_bad_folders_are_refused(small, tmp_path):
    train(small("schedule.stop_after_steps=2"), tmp_path / "a")
    train(small("schedule.stop_after_steps=2", "data.seed=7"), tmp_path / "b")
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert not found.comparable and "data order differs" in found.notes[0] and "data.seed" in found.config
    with pytest.raises(FileNotFoundError, match="not a run directory"):
        compare_runs(tmp_path / "a", tmp_path)


@pytest.mark.report("pytorch/torchtitan#4167", "huggingface/transformers#39241")
def test_the_held_out_loss_is_a_mean_over_tokens_whatever_the_batches_are(small, tmp_path):
    """7 rows in batches of 1, 2 and 4: a mean of batch means would give the last, smaller batch too much weight."""
    losses = []
    for rows in (1, 2, 4):
        folder = tmp_path / str(rows)
        short = ["precision=fp32", "schedule.stop_after_steps=1", "schedule.eval_rows=7"]
        train(small(*short, f"schedule.micro_rows={rows}"), folder)
        losses.append(read_metrics(folder)[-1]["val/loss"])
    assert max(losses) - min(losses) < 1e-6 * losses[0]


def test_evaluation_in_bf16_leaves_fp8_state_alone(small, tmp_path):
    """More evaluations must not change the curve: they advance no amax history and no weight cache."""
    base = ["precision=fp8_delayed", "precision.amax_history_len=4"]
    train(small(*base, "schedule.eval_interval=1"), tmp_path / "many")
    train(small(*base, "schedule.eval_interval=10"), tmp_path / "few")
    many, few = ([r["train/loss"] for r in read_metrics(tmp_path / name)] for name in ("many", "few"))
    assert many == few


def test_a_run_without_a_golden_curve_is_inconclusive_not_passed(small, tmp_path, monkeypatch):
    monkeypatch.setattr("te_plugin.convergence.golden.recipes_dir", lambda: tmp_path / "recipes")
    verdict = train(small("check.mode=golden"), tmp_path / "run")
    assert verdict.status == "INCONCLUSIVE" and verdict.exit_code == 2 and "check.mode=record" in verdict.reason


def test_recording_measures_twins_and_the_next_run_passes_against_it(small, tmp_path, monkeypatch):
    monkeypatch.setattr("te_plugin.convergence.golden.recipes_dir", lambda: tmp_path / "recipes")
    steps = ["data=synthetic", "schedule.tokens=12288"]  # 24 steps: the least that a curve is judged on is 20
    verdict = train(small("check.mode=record", "check.reason=the first curve", *steps), tmp_path / "record")
    assert verdict.status == "PASS" and "recorded" in verdict.reason
    header = json.loads((tmp_path / "recipes" / "llama_tiny" / "golden.jsonl").read_text().splitlines()[0])
    assert header["reason"] == "the first curve" and {"bf16", "fp8_current", "fp8_delayed"} <= set(
        header["band"]["measured"]
    )
    assert set(header["band"]["measured"]["bf16"]) == {
        "attention=composite",
        "layout=bshd",
        "schedule.micro_rows=1",
        "schedule.micro_rows=4",
    }
    again = train(small("check.mode=golden", *steps), tmp_path / "again")
    assert again.status == "PASS", again.reason
    assert all(r["gap/loss"] == 0 for r in read_metrics(tmp_path / "again"))
    doubled = train(small("check.mode=golden", "optim.lr=4e-3", *steps), tmp_path / "doubled")
    assert doubled.status == "FAIL" and Verdict.load(tmp_path / "doubled").exit_code == 1
    changed = train(small("check.mode=golden", "optim.beta2=0.9", *steps), tmp_path / "changed")
    assert changed.status == "INCONCLUSIVE" and "recipe hash" in changed.reason


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_delayed"])
def test_fused_norms_and_activations_change_no_bit_of_a_run(small, tmp_path, precision):
    """The whole llama_tiny layer stack at a small width: losses, gradient norms and the weights a checkpoint holds."""
    wide = ["model.hidden_size=128", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_hidden_size=256",
            f"precision={precision}", "schedule.stop_after_steps=5"]  # fmt: skip
    for fuse in ("true", "false"):
        train(small(*wide, f"precision.fuse={fuse}"), tmp_path / fuse)
    fused, separate = (read_metrics(tmp_path / name) for name in ("true", "false"))
    for one, other in zip(fused, separate, strict=True):
        assert set(one) == set(other)
        assert {k: v for k, v in one.items() if "perf/" not in k} == {k: v for k, v in other.items() if "perf/" not in k}
    compared = compare_runs(tmp_path / "true", tmp_path / "false")
    assert compared.comparable and compared.config == {"precision.fuse": (True, False)}
    ran = [{row["op"] for row in json.loads((tmp_path / name / "kernels.json").read_text())}
           for name in ("true", "false")]  # fmt: skip
    assert ran[0] - ran[1] == {"norm_quantize", "activation_quantize"}


@pytest.mark.parametrize("overrides", [("precision=fp8_current",), ("precision=fp8_delayed",), ("precision=fp8_block",),
                                       ("precision=fp8_current", "moe=tiny")], ids=" ".join)  # fmt: skip
def test_weights_quantised_together_change_no_bit_of_a_run(small, tmp_path, monkeypatch, overrides):
    """kernels.json shows one call a step after the first, whatever the number of layers, and no cast more than without it."""
    wide = ["model.hidden_size=128", "model.num_heads=4", "model.num_kv_heads=4", "model.ffn_hidden_size=256",
            "schedule.stop_after_steps=4", *overrides]  # fmt: skip
    train(small(*wide), tmp_path / "together")
    train(small(*wide, "model.num_layers=3"), tmp_path / "deeper")
    monkeypatch.setattr("te_plugin.torch.refresh_weights", lambda model: None)
    train(small(*wide), tmp_path / "lazily")
    together, lazily = (
        [{k: v for k, v in row.items() if "perf/" not in k} for row in read_metrics(tmp_path / name)]
        for name in ("together", "lazily")
    )
    assert len(together) == 4 and together == lazily

    def launches_of(name: str, op: str) -> list[int]:
        rows = json.loads((tmp_path / name / "kernels.json").read_text())
        return sorted(sum(row["launches"].values()) for row in rows if row["op"] == op)

    assert [launches_of(name, "quantize_many") for name in ("together", "deeper", "lazily")] == [[3], [3], []]
    assert launches_of("together", "quantize") == launches_of("lazily", "quantize")  # on the CPU each is still a launch


def test_a_run_resumes_in_the_other_form(small, tmp_path):
    """Checkpoints hold the norms under their own names whether a layer holds them or not."""
    base = ["precision=fp8_delayed", "precision.amax_history_len=4", "schedule.stop_after_steps=8"]
    train(small(*base, "precision.fuse=true"), tmp_path / "whole")
    train(small(*base[:2], "schedule.stop_after_steps=4", "precision.fuse=true"), tmp_path / "changed")
    train(small(*base, "precision.fuse=false", "run.resume=true", f"run.dir={tmp_path / 'changed'}"), tmp_path / "changed")
    whole, changed = ([r["train/loss"] for r in read_metrics(tmp_path / name)] for name in ("whole", "changed"))
    assert len(whole) == 8 and whole == changed
