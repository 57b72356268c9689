"""The launcher's side of a run: its directory, its configuration file, its processes and its exit code.

Only the launcher makes the directory, and it makes it exclusively: two runs that start in the same second get two directories,
and no rank ever creates one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from te_plugin.config import Config, ConfigError, differences, load
from te_plugin.convergence.verdict import VERDICT_FILE, Verdict
from te_plugin.training.progress import say
from te_plugin.training.run_dir import CONFIG_FILE, holder, in_use, write_config

# A resumed run keeps its weights and its place in the data; a path may have moved.
_FIXED_ON_RESUME = ("recipe", "adapter.name", "model.", "moe.num_experts", "moe.ffn_hidden_size", "data.source",
                    "data.tokenizer", "data.seq_len",
                    "data.shuffle", "data.seed", "data.val_fraction", "data.text_field", "schedule.global_rows")


def make_run_dir(cfg: Config, now: float | None = None) -> Path:
    """Make the directory of a run (or find it, on resume) and write config.resolved.yaml into it.

    ConfigError when the directory exists and the run does not resume, or when a resumed run is still written or changes its model
    or its data.
    """
    if cfg.run.resume:
        run_dir = Path(cfg.run.dir)
        _keep_previous_config(run_dir, cfg)
    elif cfg.run.dir is not None:
        run_dir = Path(cfg.run.dir)
        _mkdir(run_dir)
    else:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        run_dir = _mkdir_unique(Path("runs"), f"{cfg.recipe}-{stamp}")
    path = run_dir / CONFIG_FILE
    try:
        write_config(path, cfg)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return run_dir


def _mkdir(run_dir: Path) -> None:
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir} cannot be made: {error.strerror}; give a folder that can be written") from error
    try:
        run_dir.mkdir()
    except FileExistsError:
        raise ConfigError(f"run.dir={run_dir} exists, and one directory holds one run; give another name, or continue that run "
                          f"with run.resume=true") from None
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir} cannot be made: {error.strerror}; give a folder that can be written") from error


def _mkdir_unique(parent: Path, name: str) -> Path:
    """parent/name, or parent/name-2, -3, ... where another run was quicker. mkdir is atomic, also between machines."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            candidate = parent / (name if number == 1 else f"{name}-{number}")
            try:
                candidate.mkdir()
                return candidate
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(f"{parent}/{name} cannot be made: {error.strerror}; start where you may write, or set "
                          f"run.dir") from error
    raise ConfigError(f"{parent}/{name} and 9,999 numbered names exist; set run.dir")


def _keep_previous_config(run_dir: Path, cfg: Config) -> None:
    """A resumed run may change its settings: the earlier configuration is kept beside the new one, numbered."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"run.resume=true: {path} does not exist, so there is no run to continue; correct run.dir, or leave "
                          f"run.resume out")
    if by := holder(run_dir):
        raise ConfigError(f"run.resume=true: {in_use(run_dir, by)}")
    changed = {key: pair for key, pair in differences(load(path), cfg).items() if key not in ("run.resume", "run.dir")}
    fixed = [key for key in changed if key.startswith(_FIXED_ON_RESUME) and not key.endswith("_path")]
    if fixed:
        old, new = changed[fixed[0]]
        raise ConfigError(f"run.resume=true with {fixed[0]}={new}: the run in {run_dir} has {old}, and a resumed run keeps its "
                          f"model and data; leave it as it was, or start a new run")
    if changed:
        number = 1
        while (kept := run_dir / f"config.resolved.{number}.yaml").exists():
            number += 1
        try:
            kept.write_bytes(path.read_bytes())  # a copy: the run has a configuration at every moment
        except OSError as error:
            raise ConfigError(f"{kept} cannot be written: {error.strerror}") from error
        for key, (old, new) in changed.items():
            say(f"resume: {key} was {old}, is {new} (earlier configuration: {kept.name})")


def run_here(cfg: Config, run_dir: Path) -> int:
    """Train in this process; the exit code of the verdict."""
    from te_plugin.training.run import train

    return train(cfg, run_dir).exit_code


def run_processes(run_dir: Path, processes: int) -> int:
    """Train in `processes` workers on this machine, through torch's elastic launcher; the exit code of the verdict.

    The elastic launcher knows only 0 and 1, so the code comes from the verdict that rank 0 wrote; without one it is 1.
    """
    (run_dir / VERDICT_FILE).unlink(missing_ok=True)  # a verdict found afterwards is this run's own
    # Without a value the elastic launcher gives every process one thread, and says so at length.
    threads = os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    with subprocess.Popen(elastic_command(run_dir, processes), env={**os.environ, "OMP_NUM_THREADS": threads}) as child:
        previous = {number: signal.signal(number, lambda received, frame: child.send_signal(received))
                    for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            code = child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if not (run_dir / VERDICT_FILE).is_file():
        print(f"te-plugin train: the {processes} processes ended with exit code {code} and no verdict; continue the run with "
              f"run.dir={run_dir} run.resume=true", file=sys.stderr)
        return 1
    verdict = Verdict.load(run_dir)
    if verdict.exit_code:
        say(verdict.line)  # again, as the last line: the elastic launcher reports such an end as a failure of its workers
    return verdict.exit_code


def elastic_command(run_dir: Path, processes: int) -> list[str]:
    """torch's elastic launcher on this machine, on a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
            *worker_command(run_dir)]


def worker_command(run_dir: Path) -> list[str]:
    return ["-m", "te_plugin.training.worker", str(run_dir)]
