"""Checkpoints are complete or absent, read strictly, and hold tensors only."""

import json
import math
import os
import re
import resource
import signal

import pytest
import torch
from torch import nn

from te_plugin.convergence import Verdict
from te_plugin.torch.state import LinearState
from te_plugin.training import checkpoint as ckpt
from te_plugin.training import read_metrics
from te_plugin.training.checkpoint import CheckpointError
from te_plugin.training.distributed import World
from te_plugin.training.run import train

ALONE = World(torch.device("cpu"))


def tensors(seed=0, names=("weight", "bias")):
    generator = torch.Generator().manual_seed(seed)
    return {f"model/{name}": torch.randn(5, 3, generator=generator) for name in names}


def save(run_dir, step, values=None, keep=2):
    return ckpt.save(run_dir, step, tensors(step) if values is None else values, {"run_id": "abc"}, ALONE, keep)


def test_saved_tensors_come_back_bit_for_bit_and_old_checkpoints_are_rotated(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    assert [c.step for c in ckpt.list_checkpoints(tmp_path / "checkpoints")] == [4, 6]
    found = ckpt.latest(tmp_path)
    assert found.step == 6 and found.info["run_id"] == "abc"
    values = {name: torch.full_like(t, math.nan) for name, t in tensors().items()}
    ckpt.load(found, values, ALONE)
    assert all(torch.equal(values[name], t) for name, t in tensors(6).items())


def test_unfinished_checkpoints_are_ignored_and_removed_by_the_next_save(tmp_path):
    save(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    (folder / ".step_00000004.tmp").mkdir()
    (folder / ".step_00000004.tmp" / "__0_0.distcp").write_bytes(b"half")
    (folder / "step_00000009").mkdir()  # a folder that some copy tool left incomplete
    assert ckpt.latest(tmp_path).step == 2
    save(tmp_path, 6)
    assert not (folder / ".step_00000004.tmp").exists() and ckpt.latest(tmp_path).step == 6


@pytest.mark.report("nvidia-cosmos/cosmos-rl#555")
def test_an_older_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    """NFS keeps a file that somebody has open; the next save tries again."""
    save(tmp_path, 2)
    save(tmp_path, 4)
    with monkeypatch.context() as busy:
        busy.setattr(ckpt.shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or os.rmdir(path))
        save(tmp_path, 6)
    assert "older checkpoints cannot be removed: [Errno 39] Directory not empty" in capsys.readouterr().err
    assert ckpt.latest(tmp_path).step == 6
    save(tmp_path, 8)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000006", "step_00000008"]


@pytest.mark.report("NVIDIA/Megatron-LM#709")
@pytest.mark.parametrize(
    "stored, named",
    [
        (("wieght", "bias"), ("model/weight", "model/wieght")),
        (("weight",), ("model/bias",)),
        (("weight", "bias", "extra"), ("model/extra",)),
    ],
)
def test_missing_and_unexpected_names_are_listed(tmp_path, stored, named):
    save(tmp_path, 1, tensors(1, stored))
    with pytest.raises(CheckpointError) as error:
        ckpt.load(ckpt.latest(tmp_path), tensors(), ALONE)
    assert all(name in str(error.value) for name in named)


def test_another_shape_is_refused_by_name(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"model/bias has shape \(5, 3\), the model's is \(5, 4\)"):
        ckpt.load(ckpt.latest(tmp_path), {"model/weight": torch.empty(5, 3), "model/bias": torch.empty(5, 4)}, ALONE)


class Fp8Layer(nn.Module):
    def __init__(self, history):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))
        self.state = LinearState("fp8_delayed", history_len=history)


@pytest.mark.report("NVIDIA/TransformerEngine#199", "NVIDIA/TransformerEngine#458")
def test_fp8_state_survives_another_history_length_and_may_be_missing(tmp_path):
    source = Fp8Layer(1024)
    source.state.delayed.history.uniform_(generator=torch.Generator().manual_seed(1))
    source.state.delayed.scale.copy_(torch.tensor([3.0, 5.0, 7.0]))
    save(tmp_path, 1, {"model/weight": source.weight.detach(), **ckpt.model_state(source)})
    target = Fp8Layer(16)
    assert ckpt.load_model_state(target, ckpt.latest(tmp_path), ALONE) == []
    assert target.state.delayed.scale.tolist() == [3.0, 5.0, 7.0]
    assert torch.equal(target.state.delayed.history, source.state.delayed.history[:, :16])
    save(tmp_path, 2, {"model/weight": source.weight.detach()})
    missing = ckpt.load_model_state(target, ckpt.latest(tmp_path), ALONE)
    assert missing == ["state.delayed.history", "state.delayed.scale", "state.delayed.seen"]


def test_state_that_is_no_tensor_is_refused():
    class Pickled(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(CheckpointError, match="only tensors"):
        ckpt.model_state(Pickled(2, 2))


def test_a_full_disk_is_one_clear_error_and_the_previous_checkpoint_stays(small, tmp_path):
    """A file-size limit stands for the disk: writes fail with an error of the operating system half way through."""
    old_limit, old_handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    train(small("schedule.stop_after_steps=4"), tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, old_limit[1]))
        verdict = train(small("run.resume=true", f"run.dir={tmp_path}"), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert verdict.exit_code == 1 and Verdict.load(tmp_path).reason == verdict.reason
    assert (
        "checkpoint of step 8 could not be written" in verdict.reason
        and "checkpoint of step 4 is intact" in verdict.reason
    )
    assert "Traceback" not in verdict.reason and os.strerror(27) in verdict.reason
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 9))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000004"]
    assert train(small("run.resume=true", f"run.dir={tmp_path}"), tmp_path).status == "PASS"
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 11))


@pytest.mark.report("NVIDIA/Megatron-LM#2769", "NVIDIA-NeMo/Megatron-Bridge#3397")
def test_loaded_weights_are_active_before_the_first_step(small, tmp_path):
    train(small("precision=bf16"), tmp_path / "source")
    source_loss = read_metrics(tmp_path / "source")[-1]["val/loss"]
    first = {}
    for precision in ("bf16", "fp8_current", "fp8_delayed"):
        verdict = train(
            small(
                f"precision={precision}",
                f"run.init_from={tmp_path / 'source'}",
                "optim.lr=1e-9",
                "schedule.eval_interval=1",
                "schedule.stop_after_steps=1",
            ),
            tmp_path / precision,
        )
        assert verdict.status == "PASS", verdict.reason
        first[precision] = read_metrics(tmp_path / precision)[0]["val/loss"]
    assert all(abs(loss - source_loss) < 1e-3 for loss in first.values()), (source_loss, first)


@pytest.mark.report("NVIDIA/Megatron-LM#2769")
def test_loaded_weights_worse_than_a_uniform_guess_stop_the_run(small, tmp_path):
    train(small("schedule.stop_after_steps=4"), tmp_path / "source")
    found = ckpt.latest(tmp_path / "source")
    names = ckpt.stored_shapes(found, "model", ALONE)
    weights = {name: torch.randn(shape) * 3 for name, (shape, _) in names.items()}
    ckpt.save_weights(tmp_path / "noise", weights, {"origin": "noise"})
    verdict = train(small(f"run.init_from={tmp_path / 'noise'}"), tmp_path / "run")
    assert verdict.exit_code == 1 and "not below ln(vocabulary) = 5.95" in verdict.reason and "noise" in verdict.reason


def test_a_checkpoint_of_another_model_is_refused_before_any_step(small, tmp_path):
    train(small("schedule.stop_after_steps=4"), tmp_path / "source")
    verdict = train(small(f"run.init_from={tmp_path / 'source'}", "model.num_layers=3"), tmp_path / "run")
    assert verdict.exit_code == 1 and "missing from it: model/decoder.layers.2" in verdict.reason
    assert json.loads((tmp_path / "run" / "verdict.json").read_text())["status"] == "FAIL"


def test_weights_only_checkpoints_are_not_overwritten(tmp_path):
    ckpt.save_weights(tmp_path / "w", {"a": torch.ones(2)}, {})
    with pytest.raises(CheckpointError, match="exists already"):
        ckpt.save_weights(tmp_path / "w", {"a": torch.ones(2)}, {})
    assert ckpt.find(tmp_path / "w").info["kind"] == "weights"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        ckpt.find(tmp_path / "nothing")


def test_what_is_left_of_a_removed_checkpoint_is_neither_read_nor_in_the_way(small, tmp_path):
    """A process that is killed while it removes a checkpoint, or a user who removed a part of one."""
    run = tmp_path / "run"
    train(small("schedule.stop_after_steps=8"), run)
    (run / "checkpoints/step_00000008/state.json").unlink()
    assert [c.step for c in ckpt.list_checkpoints(run / "checkpoints")] == [4]
    assert train(small("run.resume=true", f"run.dir={run}"), run).status == "PASS"
    assert [c.step for c in ckpt.list_checkpoints(run / "checkpoints")] == [8, 10]


@pytest.mark.parametrize("name, text, message", [
    ("state.json", "x", "state.json cannot be read"), ("state.json", "{}", "it does not say its step"),
    ("state.json", "[]", "it does not say its step"), (".metadata", "x", ".metadata is damaged"),
    ("__0_0.distcp", "", "cannot be read: .*remove that folder to go on from an older checkpoint"),
])  # fmt: skip
def test_a_damaged_checkpoint_is_one_clear_error(small, tmp_path, name, text, message):
    run = tmp_path / "run"
    train(small("schedule.stop_after_steps=4"), run)
    (run / "checkpoints/step_00000004" / name).write_text(text)
    try:
        reason = train(small("run.resume=true", f"run.dir={run}"), run).reason
    except CheckpointError as error:
        reason = str(error)
    assert re.search(message, reason), reason
