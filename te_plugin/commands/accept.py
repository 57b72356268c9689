"""Accept a candidate by measurement: paired runs of BF16, a BF16 twin and the candidate for several seeds, then the gates.

The folder (runs/accept-RECIPE-TIME, or --out) gets every arm as a run directory (seed0/bf16, seed0/twin, seed0/candidate, ...),
verdict.json and accept.png. The same command with the same --out continues an interrupted acceptance: finished arms are kept.
Exit code: 0 PASS, 1 error or FAIL, 2 INCONCLUSIVE or SUSPECT.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from te_plugin.commands import launch
from te_plugin.config import Config, ConfigError, compose, differences, load, validate
from te_plugin.config.ranges import CHOICES
from te_plugin.convergence.verdict import VERDICT_FILE, Verdict
from te_plugin.training.progress import say
from te_plugin.training.run_dir import CONFIG_FILE, write_config

HELP = "is FP8 as good as BF16? paired runs and gates"
EXAMPLES = """examples:
  te-plugin accept recipe=llama_tiny
  te-plugin accept recipe=llama_tiny precision=fp8_block accept.seeds=2 --out runs/accept-block
  te-plugin accept recipe=llama_tiny --saboteur dq_slot0        also run an arm with broken gradients, which must be caught
  te-plugin accept recipe=llama3_1_8b data.path=/data/c4 parallel=fsdp2 --nproc 8"""
_NOT_HERE = ("check.", "run.dir", "run.resume", "testing.")
_MAY_GROW = ("accept.seeds",)  # an acceptance may be continued with more seeds


def add_arguments(parser) -> None:
    sabotages = [name for name in CHOICES["testing.sabotage"] if name != "none"]
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe=NAME, group=choice and key=value")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the arms go; an existing one is continued")
    parser.add_argument("--saboteur", choices=sabotages, help="one more arm, damaged in this way, that the gates must catch")
    parser.add_argument("--nproc", type=int, metavar="N", help="processes of each run, for parallel=ddp and fsdp2")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own group files")


def run(args: Namespace) -> int:
    for override in args.overrides:
        if override.lstrip("+").startswith(_NOT_HERE):
            raise ConfigError(f"{override}: accept sets this itself for each of its runs; leave it out (--out names the folder, "
                              f"--saboteur the damage)")
    cfg = compose(args.overrides, config_dir=args.config_dir)
    if args.nproc is None and cfg.parallel.name != "single" and cfg.adapter.name != "maxtext":
        raise ConfigError(f"parallel={cfg.parallel.name} needs the number of processes; add --nproc N")
    validate(cfg, world_size=1 if args.nproc is None else args.nproc)

    from te_plugin.convergence.accept import accept, require_comparable

    require_comparable(cfg)  # before a folder is made
    out = args.out or Path("runs") / f"accept-{cfg.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    _claim(out, cfg)
    say(f"acceptance: {out}")
    verdict = accept(cfg, out, lambda arm, folder: _run_arm(arm, folder, args.nproc), args.saboteur)
    for gate in verdict.details.get("gates", ()):
        say(f"  {'pass' if gate['passed'] else 'FAIL'}  {gate['name']}: {gate['message']}")
    say(verdict.line)
    return verdict.exit_code


def _claim(out: Path, cfg: Config) -> None:
    """Make the folder, or check that it belongs to the same acceptance."""
    path = out / CONFIG_FILE
    if path.is_file():
        changed = [key for key in differences(load(path), cfg) if key not in _MAY_GROW]
        if changed:
            raise ConfigError(f"--out {out} holds an acceptance with another {changed[0]}; give another folder, or the same "
                              f"settings")
    elif out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} holds other files and no acceptance; give another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_config(path, cfg)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error


def _run_arm(cfg: Config, folder: Path, processes: int | None) -> Verdict:
    """One arm, in this process or in several."""
    folder = launch.make_run_dir(cfg)
    if processes is None:
        launch.run_here(cfg, folder)
    else:
        launch.run_processes(folder, processes)
    if not (folder / VERDICT_FILE).is_file():
        return Verdict("INCONCLUSIVE", f"{folder} ended without a verdict; start the same command again to continue")
    return Verdict.load(folder)
