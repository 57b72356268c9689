"""A run directory holds the truth about a run, and a run that was broken off continues bit for bit."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from te_plugin.commands.launch import make_run_dir
from te_plugin.config import ConfigError, load, to_yaml
from te_plugin.convergence import Verdict
from te_plugin.training import read_metrics
from te_plugin.training.checkpoint import latest, list_checkpoints
from te_plugin.training.run import RunDirError, train
from te_plugin.training.wandb_sink import differences

NUMBERS = (
    "step",
    "train/tokens",
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/label_tokens",
    "val/loss",
    "fp8/nonfinite",
)


def curve(run_dir):
    """The rows without wall-clock numbers."""
    return [{key: row[key] for key in NUMBERS if key in row} for row in read_metrics(run_dir)]


def test_a_run_directory_is_complete_and_its_wandb_rows_equal_metrics_jsonl(small, tmp_path, capsys):
    verdict = train(small("track=wandb_offline"), tmp_path / "run")
    assert verdict.status == "PASS" and verdict.exit_code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: PASS"
    run = tmp_path / "run"
    for name in (
        "config.resolved.yaml",
        "env.json",
        "kernels.json",
        "metrics.jsonl",
        "verdict.json",
        "curve.png",
        "tracking.json",
    ):
        assert (run / name).stat().st_size > 0, name
    assert [c.step for c in list_checkpoints(run / "checkpoints")] == [8, 10]
    assert differences(run) == []
    kernels = json.loads((run / "kernels.json").read_text())
    assert {"attention", "gemm"} <= {k["op"] for k in kernels} and all(k["launches"] for k in kernels)
    environment = json.loads((run / "env.json").read_text())
    assert (
        environment["versions"]["torch"]
        and environment["order_hash"]
        and environment["init_hash"]
        and environment["data"]["fill"]
    )
    rows = read_metrics(run)
    assert [r["step"] for r in rows] == list(range(1, 11)) and [r["step"] for r in rows if "val/loss" in r] == [5, 10]
    assert rows[-1]["train/tokens"] == 5120 and rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert load(run / "config.resolved.yaml") == small("track=wandb_offline")
    assert Verdict.load(run).status == "PASS"


def test_a_used_run_directory_is_not_overwritten(small, tmp_path):
    train(small("schedule.stop_after_steps=1"), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RunDirError, match="run.resume=true"):
        train(small("schedule.stop_after_steps=1"), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


KILLED_RUN = """
import os, signal, sys
from te_plugin.config import load
from te_plugin.training import loop, run
original = loop.Loop._record
def record(self, step, *rest):
    original(self, step, *rest)
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), int(sys.argv[3]))
loop.Loop._record = record
sys.exit(run.train(load(sys.argv[1] + "/config.resolved.yaml"), sys.argv[1]).exit_code)
"""


def run_and_signal(cfg, run_dir, step, number):
    """A run in its own process that gets a signal right after the row of `step` was written."""
    run_dir.mkdir()
    (run_dir / "config.resolved.yaml").write_text(to_yaml(cfg))
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
    return subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(run_dir), str(step), str(int(number))],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_delayed"])
@pytest.mark.report("AI-Hypercomputer/maxdiffusion#484")
def test_after_kill_9_the_resumed_curve_equals_the_unbroken_one_bit_for_bit(small, tmp_path, precision):
    overrides = [f"precision={precision}", *(["precision.amax_history_len=4"] if precision == "fp8_delayed" else [])]
    train(small(*overrides), tmp_path / "whole")
    result = run_and_signal(small(*overrides, "track=wandb_offline"), tmp_path / "broken", 7, signal.SIGKILL)
    assert result.returncode == -signal.SIGKILL, result.stderr
    broken = tmp_path / "broken"
    assert [r["step"] for r in read_metrics(broken)] == list(range(1, 8)) and latest(broken).step == 4
    run_id = json.loads((broken / "tracking.json").read_text())["identity"]["run_id"]
    train(small(*overrides, "track=wandb_offline", "run.resume=true", f"run.dir={broken}"), broken)
    assert curve(broken) == curve(tmp_path / "whole")
    assert differences(broken) == []
    assert (
        json.loads((broken / "tracking.json").read_text())["identity"]["run_id"]
        == run_id
        == latest(broken).info["run_id"]
    )


def test_sigterm_writes_a_checkpoint_and_the_run_continues_from_it(small, tmp_path):
    train(small(), tmp_path / "whole")
    result = run_and_signal(small(), tmp_path / "stopped", 6, signal.SIGTERM)
    stopped = tmp_path / "stopped"
    assert result.returncode == 2 and "interrupted after step 7" in result.stdout, result.stderr
    assert latest(stopped).step == 7 and Verdict.load(stopped).status == "INCONCLUSIVE"
    assert train(small("run.resume=true", f"run.dir={stopped}"), stopped).status == "PASS"
    assert curve(stopped) == curve(tmp_path / "whole")


def test_resume_before_the_first_checkpoint_starts_again_without_duplicates(small, tmp_path):
    run_and_signal(small(), tmp_path / "early", 2, signal.SIGKILL)
    early = tmp_path / "early"
    assert latest(early) is None and len(read_metrics(early)) == 2
    train(small("run.resume=true", f"run.dir={early}"), early)
    assert [r["step"] for r in read_metrics(early)] == list(range(1, 11))


ENDLESS = """
import sys, time
from te_plugin.config import load
from te_plugin.training import loop, run
def record(self, step, *rest):
    print("first step", flush=True)
    time.sleep(600)
loop.Loop._record = record
run.train(load(sys.argv[1] + "/config.resolved.yaml"), sys.argv[1])
"""


@pytest.mark.report("TheMorpheus407/RepoLens#222")
def test_a_directory_that_a_run_writes_is_left_alone_until_that_run_is_gone(small, tmp_path):
    """Neither a second start nor the launcher's new configuration touches it; a killed run holds nothing back."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(to_yaml(small(f"run.dir={run}")))
    first = subprocess.Popen([sys.executable, "-c", ENDLESS, str(run)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    try:
        assert b"first step" in first.stdout.read(len("first step"))
        again = small("run.resume=true", f"run.dir={run}", "optim.lr=1e-4")
        before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
        with pytest.raises(RunDirError, match=f"is being written by process {first.pid} on .*wait until that run has ended"):
            train(again, run)
        with pytest.raises(ConfigError, match=f"is being written by process {first.pid}"):
            make_run_dir(again)
        assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    finally:
        first.kill()
        first.wait()
    assert train(small("run.resume=true", f"run.dir={run}"), make_run_dir(again)).status == "PASS"


def test_a_picture_that_cannot_be_written_is_told_and_stands_in_the_verdict_file_too(small, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("te_plugin.convergence.pictures.draw_run", full)
    verdict = train(small("schedule.stop_after_steps=1"), tmp_path)
    assert verdict.line.startswith("verdict: FAIL: PASS, but the run directory could not be completed: [Errno 28]")
    assert Verdict.load(tmp_path) == verdict


@pytest.mark.parametrize("kept", [0, 2, None])
def test_a_run_whose_rows_were_lost_is_not_judged(small, tmp_path, kept):
    """The checkpoint knows more steps than metrics.jsonl: what is left of the curve must not stand for the run."""
    train(small("schedule.stop_after_steps=4"), tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    if kept is None:
        metrics.unlink()
    else:
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:kept]))
    verdict = train(small("run.resume=true", f"run.dir={tmp_path}", "schedule.stop_after_steps=4"), tmp_path)
    assert (verdict.exit_code, "of 4 steps" in verdict.reason) == ((2, True) if kept else (1, False))


def test_a_disk_that_is_full_before_the_first_step_is_one_message(small, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("te_plugin.training.run.write_json", full)
    with pytest.raises(RunDirError, match="the run directory .* cannot be written: .*No space left"):
        train(small(), tmp_path / "run")


UNREAD = """
import sys
from te_plugin.training.worker import main
code = main(sys.argv[1:])
sys.stdout = None  # a full disk would also refuse Python's last flush
sys.exit(code)
"""


@pytest.mark.report("sosreport/sos#4465")
@pytest.mark.parametrize("reader", ["gone", "full"])
def test_a_run_goes_on_when_nobody_reads_what_it_prints(small, tmp_path, reader):
    """`te-plugin train ... | head`, and a log on a full disk; the exit code is the verdict's."""
    (tmp_path / "config.resolved.yaml").write_text(to_yaml(small()))
    if reader == "gone":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run([sys.executable, "-c", UNREAD, str(tmp_path)], stdout=write, stderr=subprocess.PIPE, text=True,
                          cwd=Path(__file__).parents[2])  # fmt: skip
    os.close(write)
    assert done.returncode == 0 and "BrokenPipe" not in done.stderr, done.stderr
    assert Verdict.load(tmp_path).status == "PASS" and len(read_metrics(tmp_path)) == 10


def test_a_changed_learning_rate_on_resume_goes_on_and_is_recorded(small, tmp_path):
    train(small("schedule.stop_after_steps=4"), tmp_path)
    train(small("run.resume=true", f"run.dir={tmp_path}", "optim.lr=1e-3"), tmp_path)
    changes = json.loads((tmp_path / "tracking.json").read_text())["changes"]
    assert changes["optim.lr"] == [2e-3, 1e-3]
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 11))


def test_a_run_that_diverges_fails_with_the_step_and_keeps_its_rows(small, tmp_path):
    verdict = train(small("optim.lr=1e30", "optim.clip_grad=1e30", "track=wandb_offline"), tmp_path)
    assert verdict.exit_code == 1 and "is nan" in verdict.reason or "is inf" in verdict.reason
    rows = read_metrics(tmp_path)
    assert rows and f"step {rows[-1]['step']}" in verdict.reason
    assert differences(tmp_path) == []


def test_toggles_do_not_change_data_order_or_initial_weights(small, tmp_path):
    seen = set()
    for number, overrides in enumerate(
        (
            ["precision=bf16"],
            ["precision=fp32"],
            ["precision=fp8_delayed"],
            ["layout=bshd"],
            ["schedule.micro_rows=1"],
            ["attention=composite"],
        )
    ):
        train(small(*overrides, "schedule.stop_after_steps=1"), tmp_path / str(number))
        environment = json.loads((tmp_path / str(number) / "env.json").read_text())
        seen.add((environment["order_hash"], environment["init_hash"], environment["recipe_hash"]))
    assert len(seen) == 1


@pytest.mark.report("NVIDIA-NeMo/RL#2519")
def test_a_run_is_not_continued_on_other_rows(small, tmp_path):
    """Rows are counted, so with other data the next ones are not those that were never seen."""
    texts, run = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02d}.txt").write_text(f"document {number} of the first texts, " * (number + 1))
    data = ["data=text", f"data.path={texts}", "data.val_fraction=0.1"]
    train(small(*data, "schedule.stop_after_steps=4"), run)
    (texts / "00a.txt").write_text("one more document")
    with pytest.raises(RunDirError, match="documents were added, removed or changed"):
        train(small(*data, "run.resume=true", f"run.dir={run}"), run)
    (texts / "00a.txt").unlink()
    before = (texts / "07.txt").read_text()
    (texts / "07.txt").write_text(before.upper())  # as long as it was: the order of rows is the same
    with pytest.raises(RunDirError, match="token_hash .*: documents were added, removed or changed"):
        train(small(*data, "run.resume=true", f"run.dir={run}"), run)
    (texts / "07.txt").write_text(before)
    with pytest.raises(RunDirError, match="stands at row 16 after 4 steps, and schedule.global_rows=8 makes them 32"):
        train(small(*data, "run.resume=true", f"run.dir={run}", "schedule.global_rows=8", "schedule.tokens=10240"), run)
    assert Verdict.load(run).status == "PASS", "what was refused leaves the run as it was"
    assert train(small(*data, "run.resume=true", f"run.dir={run}"), run).status == "PASS"
    assert [row["step"] for row in read_metrics(run)] == list(range(1, 11))


@pytest.mark.parametrize("fraction,words", [("0.005", "over all"), ("0", "not computed")])
def test_fewer_held_out_rows_than_asked_for_are_told(small, tmp_path, capsys, fraction, words):
    options = [f"data.val_fraction={fraction}", "schedule.stop_after_steps=1"]
    train(small(*options, "schedule.eval_rows=100000"), tmp_path / "many")
    told = [line for line in capsys.readouterr().out.splitlines() if "held-out" in line]
    assert len(told) == 1 and words in told[0] and "schedule.eval_rows=100000" in told[0]
    if fraction != "0":
        train(small(*options), tmp_path / "few")
        assert "held-out" not in capsys.readouterr().out


def test_a_run_without_held_out_documents_makes_no_evaluation_and_continues(small, tmp_path):
    run = tmp_path / "run"
    train(small("data.val_fraction=0", "schedule.stop_after_steps=4"), run)
    verdict = train(small("data.val_fraction=0", "run.resume=true", f"run.dir={run}"), run)
    assert verdict.status == "PASS" and not any("val/loss" in row for row in read_metrics(run))
