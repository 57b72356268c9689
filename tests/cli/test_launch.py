"""The launcher alone makes the run directory, exclusively, and the exit code of a run is its verdict's."""

import errno
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from te_plugin.commands import launch
from te_plugin.config import ConfigError, compose, load
from te_plugin.convergence.verdict import Verdict

NOON = time.mktime((2026, 1, 1, 12, 0, 0, 0, 0, -1))


def tiny(*overrides: str):
    return compose(["recipe=llama_tiny", *overrides], for_run=False)


def make_in(folder: str) -> str:
    os.chdir(folder)
    return str(launch.make_run_dir(tiny(), now=NOON))


@pytest.mark.report("hydra-ecosystem/hydra#2925")
def test_launchers_that_start_in_the_same_second_get_a_directory_each(tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        made = pool.map(make_in, [str(tmp_path)] * 4)
    assert sorted(made) == [f"runs/llama_tiny-20260101-120000{suffix}" for suffix in ("", "-2", "-3", "-4")]
    for name in made:
        assert [path.name for path in (tmp_path / name).iterdir()] == ["config.resolved.yaml"]
        assert load(tmp_path / name / "config.resolved.yaml") == tiny()


@pytest.mark.report("hydra-ecosystem/hydra#2925")
def test_a_directory_that_exists_is_never_shared(tmp_path):
    run_dir = launch.make_run_dir(tiny(f"run.dir={tmp_path}/deep/run"))
    with pytest.raises(ConfigError, match=r"exists, and one directory holds one run.*run\.resume=true"):
        launch.make_run_dir(tiny(f"run.dir={run_dir}"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/run cannot be made"):
        launch.make_run_dir(tiny(f"run.dir={tmp_path}/file/run"))


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match="does not exist, so there is no run to continue"):
        launch.make_run_dir(tiny(f"run.dir={tmp_path}/none", "run.resume=true"))


@pytest.mark.report("meta-pytorch/torchtune#1080")
def test_resume_with_changed_settings_keeps_both_configurations(tmp_path, capsys):
    run_dir = launch.make_run_dir(tiny(f"run.dir={tmp_path}/run"))
    launch.make_run_dir(tiny(f"run.dir={run_dir}", "run.resume=true", "optim.lr=1e-5"))
    assert load(run_dir / "config.resolved.yaml").optim.lr == 1e-5
    assert load(run_dir / "config.resolved.1.yaml").optim.lr == tiny().optim.lr
    assert "optim.lr was 0.002, is 1e-05" in capsys.readouterr().out.replace(str(tiny().optim.lr), "0.002")
    launch.make_run_dir(tiny(f"run.dir={run_dir}", "run.resume=true", "optim.lr=1e-4"))
    assert load(run_dir / "config.resolved.2.yaml").optim.lr == 1e-5


@pytest.mark.parametrize("full", ["config.resolved.1.yaml", "config.resolved.yaml"])
def test_a_resume_that_is_cut_short_leaves_a_configuration_to_resume_from(tmp_path, monkeypatch, full):
    run_dir = launch.make_run_dir(tiny(f"run.dir={tmp_path}/run"))

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((Path, "write_bytes") if "1" in full else (launch, "write_config")), no_space)
    with pytest.raises(ConfigError, match=f"{full} cannot be written: No space left"):
        launch.make_run_dir(tiny(f"run.dir={run_dir}", "run.resume=true", "optim.lr=1e-5"))
    assert load(run_dir / "config.resolved.yaml").optim.lr == tiny().optim.lr


def test_resume_without_changes_keeps_one_configuration(tmp_path):
    run_dir = launch.make_run_dir(tiny(f"run.dir={tmp_path}/run"))
    launch.make_run_dir(tiny(f"run.dir={run_dir}", "run.resume=true"))
    assert [path.name for path in run_dir.iterdir()] == ["config.resolved.yaml"]


@pytest.mark.parametrize("override", ["model.num_layers=3", "data.seed=7", "data.seq_len=512", "schedule.global_rows=4"])
def test_resume_with_another_model_or_other_data_is_refused(tmp_path, override):
    run_dir = launch.make_run_dir(tiny(f"run.dir={tmp_path}/run"))
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        launch.make_run_dir(tiny(f"run.dir={run_dir}", "run.resume=true", override))
    assert load(run_dir / "config.resolved.yaml").model.num_layers == 4


# ---- exit codes: a stand-in worker plays what the real one may do ----

WORKER = """
import os, sys, time
from te_plugin.convergence.verdict import Verdict
rank, status = int(os.environ["RANK"]), sys.argv[1]
if status == "crash":
    raise RuntimeError(f"rank {rank} breaks")
if rank == 0:
    Verdict(status).save(".")
while not os.path.exists("verdict.json"):  # the real ranks get the verdict from rank 0 once it is saved
    time.sleep(0.01)
sys.exit(Verdict(status).exit_code)
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """run_processes with a worker that ends as told, started through the real elastic launcher."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(launch.__file__).parents[2]))
    monkeypatch.setattr(launch, "worker_command", lambda run_dir: [str(tmp_path / "worker.py"), status[0]])
    status = [""]

    def run(ends: str) -> int:
        status[0] = ends
        return launch.run_processes(tmp_path, 2)

    return run


@pytest.mark.report("NVIDIA/TransformerEngine#2698")
@pytest.mark.parametrize("ends,code", [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 2), ("crash", 1)])
def test_the_exit_code_of_processes_is_never_lost(workers, ends, code, capfd):
    assert workers(ends) == code
    if code and ends != "crash":
        assert capfd.readouterr().out.splitlines()[-1] == f"verdict: {ends}"


def test_the_exit_code_of_one_process_is_its_verdicts(monkeypatch, tmp_path):
    import te_plugin.training.run

    for status, code in (("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 2), ("SUSPECT", 2)):
        monkeypatch.setattr(te_plugin.training.run, "train", lambda cfg, run_dir, status=status: Verdict(status))
        assert launch.run_here(tiny(), tmp_path) == code


def test_the_workers_are_this_python_and_load_the_run_directory(tmp_path):
    assert launch.worker_command(tmp_path) == ["-m", "te_plugin.training.worker", str(tmp_path)]
    assert sys.executable in launch.elastic_command(tmp_path, 2)
