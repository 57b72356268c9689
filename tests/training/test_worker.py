"""A rank's exit code is the verdict's, and a crash is never 0."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from te_plugin.config import to_yaml
from te_plugin.convergence import Verdict
from te_plugin.training import worker
from te_plugin.training.loop import Loop


def prepared(cfg, run_dir):
    run_dir.mkdir()
    (run_dir / "config.resolved.yaml").write_text(to_yaml(cfg))
    return [str(run_dir)]


@pytest.mark.report("ROCm/Megatron-LM#145")
def test_exit_codes_follow_the_verdict(small, tmp_path, capsys):
    assert worker.main(prepared(small("schedule.stop_after_steps=1"), tmp_path / "pass")) == 0
    assert worker.main(prepared(small("optim.lr=1e30", "optim.clip_grad=1e30"), tmp_path / "fail")) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict: FAIL: the ")
    assert worker.main([str(tmp_path / "pass")]) == 1  # a used run directory
    assert "already holds a run" in capsys.readouterr().err
    assert worker.main([]) == 1


def test_what_is_the_users_to_repair_is_one_message_a_machine(small, tmp_path, monkeypatch, capsys):
    arguments = prepared(small("schedule.stop_after_steps=1"), tmp_path / "run")
    (tmp_path / "run" / "tracking.json").write_text("{")
    assert worker.main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: ")
    missing = [str(tmp_path / "on another machine")]
    for rank, local_rank, said in ((8, 0, "error on rank 8: "), (9, 1, "")):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert worker.main(missing) == 1
        error = capsys.readouterr().err
        assert error.startswith(said) and bool(error) == bool(said) and "Traceback" not in error


@pytest.mark.report("NVIDIA/TransformerEngine#2698")
def test_a_crash_leaves_a_verdict_and_its_traceback(small, tmp_path, monkeypatch):
    def broken(self, *rest):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Loop, "_record", broken)
    with pytest.raises(ZeroDivisionError):
        worker.main(prepared(small(), tmp_path / "run"))
    assert Verdict.load(tmp_path / "run").reason == "crashed: ZeroDivisionError: a defect"


def test_two_torchrun_ranks_write_one_run_and_return_its_exit_code(small, tmp_path):
    """torchrun, two workers, one run directory: config, rows, wandb run and checkpoint exist once."""
    cfg = small("parallel=ddp", "schedule.micro_rows=1", "track=wandb_offline", "schedule.stop_after_steps=3")
    arguments = prepared(cfg, tmp_path / "run")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"} | {"OMP_NUM_THREADS": "1"}
    command += ["-m", "te_plugin.training.worker", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("verdict: PASS") == 1
    run = tmp_path / "run"
    assert len(list(run.glob("wandb/offline-run-*"))) == 1
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_00000003"]
