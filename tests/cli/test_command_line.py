"""What a person types, and what comes back: exit codes, one message on stderr, no traceback."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from te_plugin import cli
from te_plugin.commands import COMMANDS, available
from te_plugin.commands import train as train_command
from te_plugin.config import compose, loads, to_yaml, validate

TINY = "recipe=llama_tiny"


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)

    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(list(argv))
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def refused(run, *argv: str) -> str:
    """The message of a command that must fail: exit 1, nothing but one message on stderr."""
    code, _, err = run(*argv)
    assert code == 1 and "Traceback" not in err and err.startswith("te-plugin"), (code, err)
    return err


def test_help_lists_only_commands_that_exist(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert bool(re.search(rf"\n    {command}\s", out)) == (command in available())


@pytest.mark.parametrize("command", sorted(available()))
def test_every_command_explains_itself_with_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0 and "examples:" in out and f"te-plugin {command}" in out


@pytest.mark.parametrize("argv", [(), ("nonsense",), ("train", "--nonsense", TINY), ("train", TINY, "--nproc", "two"),
                                  ("train", TINY, "--cfg", "nonsense")])
def test_usage_errors_exit_with_1_because_2_means_no_clear_verdict(run, argv):
    assert "--help" in refused(run, *argv)


def test_cfg_job_prints_a_config_that_reads_back_equal_and_runs_nothing(run, tmp_path):
    code, out, _ = run("train", TINY, "--cfg", "job", "optim.lr=1e-5", "track.run_name=1E234")
    assert code == 0 and not list(tmp_path.iterdir())
    assert loads(out) == compose([TINY, "optim.lr=1e-5", "track.run_name=1E234"], for_run=False)


MISTAKES = [
    ((), "no recipe is chosen"),
    (("recipe=llama_tini",), "nearest is llama_tiny"),
    ((TINY, "+model.head_dmi=3"), "nearest is 'model.head_dim'"),
    ((TINY, "data.shuffle=off"), "true or false"),
    ((TINY, "thd=off"), "layout"),
    ((TINY, "precision="), "precision cannot be empty"),
    ((TINY, "precision=null"), "precision cannot be empty"),
    ((TINY, "model.hidden_size=-256"), "model.hidden_size=-256 is out of range"),
    ((TINY, "schedule.global_rows=0"), "schedule.global_rows=0 is out of range"),
    ((TINY, "data=jsonl", "data.path=/nowhere/at/all"), "data.path=/nowhere/at/all: no such file"),
    ((TINY, "data=jsonl", f"data.path={'a' * 5000}"), "no such file"),
    ((TINY, f"run.init_from={'a' * 5000}"), "no such checkpoint"),
    ((TINY, "data.tokenizer=hf", f"data.tokenizer_path={'a' * 5000}"), "no such file"),
    ((TINY, "run.seed=99999999999999999999"), "run.seed=99999999999999999999 is out of range"),
    ((TINY, "attention.window_left=99999999999"), "at least 0 and at most 2147483647"),
    ((TINY, "attention.kernel=sm90", "run.device=cpu"), "attention"),
    ((TINY, "adapter=maxtext", "layout=bshd"), "layout=thd"),
    ((TINY, "adapter=maxtext", "--nproc", "2"), "one process"),
    ((TINY, "accept.seeds=2"), "mean nothing to train"),
    ((TINY, "parallel=ddp"), "add --nproc N"),
    ((TINY, "--nproc", "0"), "at least one process"),
    ((TINY, "parallel=ddp", "--nproc", "2"), "2 data-parallel processes"),
]


@pytest.mark.parametrize("argv,message", MISTAKES, ids=[" ".join(argv)[:80] or "nothing" for argv, _ in MISTAKES])
def test_a_mistake_is_one_message_and_leaves_nothing_behind(run, tmp_path, argv, message):
    assert message in refused(run, "train", *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.report("hydra-ecosystem/hydra#2925")
def test_train_under_torchrun_is_refused_and_makes_no_directory(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert "torchrun" in refused(run, "train", TINY) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["compare", "sync"])
def test_a_folder_without_a_run_is_named(run, tmp_path, command):
    folders = [str(tmp_path / "no_run")] * (2 if command == "compare" else 1)
    assert "no_run is no run directory: no such folder" in refused(run, command, *folders)
    (tmp_path / "no_run").mkdir()
    assert "holds no config.resolved.yaml" in refused(run, command, *folders)


def test_prepare_writes_the_run_directory_and_prints_it(run, tmp_path):
    code, out, _ = run("train", TINY, "--prepare", "run.dir=prepared", "run.device=cpu")
    assert code == 0 and out.strip() == "prepared"
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == ["config.resolved.yaml"]
    cfg = compose([TINY, "run.dir=prepared", "run.device=cpu"])
    assert (tmp_path / "prepared/config.resolved.yaml").read_text() == to_yaml(cfg)


def test_overrides_may_stand_on_both_sides_of_an_option(run):
    code, out, _ = run("train", "--cfg", "job", TINY, "layout=bshd")
    assert code == 0 and loads(out).layout.name == "bshd"


def test_the_package_runs_as_a_module_from_any_folder(tmp_path):
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "te_plugin", "train", TINY, "--cfg", "job", "optim.lr=inf"], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "optim.lr=inf is not finite" in done.stderr


def test_a_defect_of_ours_keeps_its_traceback(run, monkeypatch):
    monkeypatch.setattr("te_plugin.commands.train.run", lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("train", TINY)


def documented_runs() -> list[str]:
    """The runs of small recipes that the README and the help of `train` show."""
    root = Path(cli.__file__).parents[1]
    shown = (root / "README.md").read_text(encoding="utf-8") + train_command.EXAMPLES
    return sorted(set(re.findall(r"te-plugin train (recipe=llama\w*_tiny(?: [a-z_.]+=[\w.]+| --nproc \d+)*)(?=\s|$)", shown)))


@pytest.mark.parametrize("line", documented_runs())
def test_the_runs_that_are_shown_can_run(line):
    settings, _, processes = line.partition(" --nproc ")
    validate(compose([*settings.split(), "run.dir=somewhere"]), for_run=True, world_size=int(processes or 1))


def test_a_folder_that_cannot_be_made_is_named_before_any_work(run, tmp_path):
    """A file stands where the folder should: https://github.com/hydra-ecosystem/hydra/issues/1817"""
    (tmp_path / "runs").write_text("")
    assert "runs/bench cannot be made: Not a directory" in refused(run, "bench", "quantize")


@pytest.mark.parametrize("argv", [("explain", TINY, "--processes", "0"), ("explain", TINY, "parallel=ddp", "--processes", "-2"),
                                  ("accept", TINY, "--nproc", "0"), ("bench", "quantize", "--seconds", "-1"),
                                  ("bench", "quantize", "--seconds", "nan")], ids=" ".join)
def test_counts_and_times_that_mean_nothing_are_refused(run, tmp_path, argv):
    assert argv[-1] in refused(run, *argv) and not list(tmp_path.iterdir())


def test_a_comparison_that_cannot_be_written_names_its_folder(run, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.resolved.yaml").write_text(to_yaml(compose([TINY], for_run=False)))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "train/loss": 5.0}\n')
    assert "a/metrics.jsonl cannot be written: File exists" in refused(run, "compare", "a", "b", "--out", "a/metrics.jsonl")
