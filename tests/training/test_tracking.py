"""One run for all ranks, no dropped row, and a wandb that can fail without hurting the run."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import types

import pytest

from te_plugin.training import Tracker, read_metrics
from te_plugin.training.metrics import MetricsError
from te_plugin.training.tracking import TrackingError, resolve_mode, sync
from te_plugin.training.wandb_sink import differences, offline_runs, read_wandb_rows, wandb_installed


def own_service():
    """The environment of a fresh shell: without the wandb service that this test process may already have started."""
    return {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}


class FakeRun:
    """Keeps what a wandb server would keep: rows whose step is not below the last one."""

    def __init__(self, server, settings, fail_after=None):
        self.server, self.fail_after, self.sent, self.step = server, fail_after, 0, len(server["rows"])
        self.config = types.SimpleNamespace(update=self.update)

    def update(self, values, allow_val_change=False):
        for key, value in values.items():
            if key in self.server["config"] and self.server["config"][key] != value and not allow_val_change:
                raise ValueError(f"ConfigError: {key} changed")
            self.server["config"][key] = value

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, row, step=None):
        if self.fail_after is not None and self.sent >= self.fail_after:
            raise ConnectionError("network is gone")
        self.sent += 1
        if step is None or step >= len(self.server["rows"]):
            self.server["rows"].append(dict(row))

    def finish(self, exit_code=0):
        pass


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.inits, module.servers, module.fail_after, module.fail_init = [], {}, None, False

    def init(**kwargs):
        module.inits.append(kwargs)
        if module.fail_init:
            raise RuntimeError("no API key configured")
        server = module.servers.setdefault(kwargs["id"], {"rows": [], "config": {}})
        return FakeRun(server, kwargs, module.fail_after)

    module.init = init
    module.Settings = lambda **kwargs: kwargs
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def log(tracker, steps):
    for step in steps:
        tracker.log({"step": step, "train/tokens": 100 * step, "train/loss": 1 / (step + 1)})


@pytest.mark.report("wandb/wandb#9871")
@pytest.mark.parametrize("rank, local_rank, inits", [(0, 0, 1), (1, 1, 0), (3, 3, 0), (8, 0, 0)])
def test_only_global_rank_0_starts_a_run_and_writes_files(fake_wandb, tmp_path, monkeypatch, rank, local_rank, inits):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    tracker = Tracker(tmp_path / "run", mode="wandb")
    tracker.config({"lr": 1})
    tracker.resume(0)
    log(tracker, range(3))
    tracker.finish()
    assert len(fake_wandb.inits) == inits
    assert (tmp_path / "run").exists() == bool(inits)


@pytest.mark.report("wandb/wandb#5632")
def test_resume_from_an_older_checkpoint_leaves_no_gap_and_drops_nothing(tmp_path):
    tracker = Tracker(tmp_path, mode="wandb_offline")
    log(tracker, range(5))
    tracker.resume(3)
    log(tracker, range(3, 6))
    tracker.finish()
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]
    (file,) = offline_runs(tmp_path)
    assert [r["step"] for r in read_wandb_rows(file)] == [0, 1, 2, 3, 4, 5]
    assert differences(tmp_path) == []


@pytest.mark.report("wandb/wandb#4482")
def test_logging_an_old_step_without_resume_raises_and_drops_nothing(fake_wandb, tmp_path):
    tracker = Tracker(tmp_path, mode="wandb")
    log(tracker, range(5))
    with pytest.raises(MetricsError, match="resume"):
        log(tracker, [3])
    assert [r["step"] for r in fake_wandb.servers[tracker.run_id]["rows"]] == list(range(5))


def test_online_resume_sends_rows_the_server_lost_and_keeps_the_run_id(fake_wandb, tmp_path):
    first = Tracker(tmp_path, mode="wandb")
    log(first, range(6))
    server = fake_wandb.servers[first.run_id]
    del server["rows"][3:]  # killed before the last rows were sent
    second = Tracker(tmp_path, mode="wandb")
    second.resume(5)
    log(second, range(5, 8))
    assert second.run_id == first.run_id
    assert [r["step"] for r in server["rows"]] == list(range(8))


def test_rows_read_back_by_wandb_equal_metrics_jsonl(tmp_path):
    tracker = Tracker(tmp_path, mode="wandb_offline", group="g", tags=["fp8_current", "thd"])
    tracker.config({"optim": {"lr": 1e-3}, "recipe": "tiny"})
    values = [0.1, 1e-30, 123456789.123, math.nan, math.inf, -math.inf, 1.1234567890123457]
    for step, value in enumerate(values, start=1):
        tracker.log({"step": step, "train/tokens": step * 2048, "train/loss": value, "perf/step_s": 0.25 * step})
    tracker.finish()
    assert differences(tmp_path) == []
    rows = read_metrics(tmp_path)
    rows[2]["train/loss"] = 0.0
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows if math.isfinite(r["train/loss"]))
    )
    assert differences(tmp_path), "the comparison must notice a changed value"


def test_a_second_process_with_the_same_run_dir_keeps_one_run(tmp_path):
    code = (
        "import sys; from te_plugin.training import Tracker\n"
        "t = Tracker(sys.argv[1], mode='wandb_offline'); start = int(sys.argv[2]); t.resume(start)\n"
        "[t.log({'step': s, 'train/tokens': s * 10, 'train/loss': 1 / s}) for s in range(start, start + 4)]; t.finish()"
    )
    for start in (1, 3):
        subprocess.run([sys.executable, "-c", code, str(tmp_path), str(start)], check=True, env=own_service())
    assert len(offline_runs(tmp_path)) == 1
    assert differences(tmp_path) == []
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_kill_9_inside_a_run_then_resume_loses_no_row(tmp_path):
    code = (
        "import sys, os, signal; from te_plugin.training import Tracker\n"
        "t = Tracker(sys.argv[1], mode='wandb_offline')\n"
        "[t.log({'step': s, 'train/tokens': s * 10, 'train/loss': 1 / s}) for s in range(1, 8)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=own_service())
    assert result.returncode == -signal.SIGKILL
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 8))
    tracker = Tracker(tmp_path, mode="wandb_offline")
    tracker.resume(6)
    log(tracker, range(6, 10))
    tracker.finish()
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 10))
    assert differences(tmp_path) == []


@pytest.mark.report("meta-pytorch/torchtune#1080")
def test_a_changed_config_on_resume_keeps_both_values_and_goes_on(fake_wandb, tmp_path):
    first = Tracker(tmp_path, mode="wandb")
    first.config({"lr": 1, "same": 5})
    log(first, [1])
    second = Tracker(tmp_path, mode="wandb")
    second.resume(2)
    second.config({"lr": 2, "same": 5})
    log(second, [2])
    assert second.changes == {"lr": [1, 2]}
    assert fake_wandb.inits[-1]["config"]["resume_changes"] == {"lr": [1, 2]}
    second.config({"lr": 3})
    assert second.changes == {"lr": [1, 2, 3]}
    assert fake_wandb.servers[second.run_id]["config"]["resume_changes"] == {"lr": [1, 2, 3]}


def test_a_changed_config_is_accepted_by_the_real_wandb(tmp_path):
    for start, lr in ((1, 1.0), (2, 2.0)):
        tracker = Tracker(tmp_path, mode="wandb_offline")
        tracker.resume(start)
        tracker.config({"lr": lr})
        log(tracker, [start])
        tracker.config({"lr": lr})
        tracker.finish()
    assert tracker.error is None and tracker.changes == {"lr": [1.0, 2.0]}
    assert differences(tmp_path) == []


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_failing_wandb_warns_once_and_loses_no_row(fake_wandb, tmp_path, where):
    fake_wandb.fail_init = where == "init"
    fake_wandb.fail_after = 2 if where == "log" else None
    warnings = []
    tracker = Tracker(tmp_path, mode="wandb", warn=warnings.append)
    log(tracker, range(6))
    tracker.finish()
    assert len(warnings) == 1 and "te-plugin sync" in warnings[0]
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(6))
    assert json.loads((tmp_path / "tracking.json").read_text())["wandb_error"]
    fake_wandb.fail_init, fake_wandb.fail_after = False, None
    assert sync(tmp_path) == 6
    assert [r["step"] for r in fake_wandb.servers[tracker.run_id]["rows"]] == list(range(6))


def test_an_unreachable_server_does_not_stop_the_real_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    warnings = []
    tracker = Tracker(tmp_path, mode="wandb", timeout_s=2.0, warn=warnings.append)
    log(tracker, range(4))
    tracker.finish()
    assert len(warnings) == 1
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(4))
    with pytest.raises(TrackingError, match="4 rows"):
        sync(tmp_path, timeout_s=2.0)


def test_the_death_of_the_wandb_service_does_not_lose_a_row(tmp_path):
    code = (
        "import sys, os, signal, subprocess, time; from te_plugin.training import Tracker\n"
        "t = Tracker(sys.argv[1], mode='wandb_offline')\n"
        "row = lambda s: t.log({'step': s, 'train/tokens': s * 10, 'train/loss': 1 / s})\n"
        "row(1)\n"
        "mine = [int(p) for p in os.listdir('/proc') if p.isdigit() and os.path.exists(f'/proc/{p}/stat')\n"
        "        and open(f'/proc/{p}/stat').read().rsplit(')', 1)[1].split()[1] == str(os.getpid())]\n"
        "assert mine, 'no service process found'\n"
        "[os.kill(p, signal.SIGKILL) for p in mine]; time.sleep(0.5)\n"
        "[row(s) for s in range(2, 20)]; t.finish(); print('finished')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, env=own_service()
    )
    assert "finished" in result.stdout, result.stderr
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 20))
    assert sync(tmp_path, mode="wandb_offline") == 19
    assert differences(tmp_path) == []


def test_modes_that_cannot_work_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(TrackingError, match="unknown"):
        Tracker(tmp_path / "a", mode="tensorboard")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackingError, match="not installed"):
        Tracker(tmp_path / "b", mode="wandb")
    assert Tracker(tmp_path / "c", mode="auto").mode == "jsonl"
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_sync_of_a_folder_that_is_no_run_says_so(tmp_path):
    with pytest.raises(TrackingError, match="not a run directory"):
        sync(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.report("wandb/wandb#10580")
def test_a_folder_of_runs_named_wandb_is_not_the_package(tmp_path, monkeypatch):
    """Python finds any folder of that name in the working directory as a package without an __init__."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert importlib.util.find_spec("wandb") is not None and not wandb_installed()
    assert resolve_mode("auto") == "jsonl"
    with pytest.raises(TrackingError, match="not installed"):
        resolve_mode("wandb")


def test_a_full_disk_at_the_end_does_not_hide_how_the_run_ended(tmp_path):
    warnings = []
    tracker = Tracker(tmp_path, warn=warnings.append)
    log(tracker, range(3))
    tracker.metrics.close()
    tracker.metrics._file = open("/dev/full", "w")  # closing it writes what waits, and fails
    tracker.metrics._file.write("a row")
    tracker.finish(1)
    assert len(warnings) == 1 and "could not be completed: [Errno 28] No space left on device" in warnings[0]


def test_sync_without_rows_says_so(tmp_path):
    Tracker(tmp_path).finish()
    with pytest.raises(TrackingError, match="has no metrics.jsonl: there are no rows to send"):
        sync(tmp_path, mode="wandb_offline")


@pytest.mark.parametrize("text", ['{"mode":', "", "[]", "{}", '{"identity": {"run_id": "a", "tags": [], "unknown": 1}}'])
def test_a_damaged_tracking_file_is_named(tmp_path, text):
    (tmp_path / "tracking.json").write_text(text)
    with pytest.raises(TrackingError, match="tracking.json cannot be read .*remove it"):
        Tracker(tmp_path)
