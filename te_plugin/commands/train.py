"""Train a recipe: compose the configuration, refuse what cannot run, print the plan, train, check the curve.

The run directory (runs/RECIPE-TIME, or run.dir) gets config.resolved.yaml, env.json, kernels.json, metrics.jsonl, checkpoints,
verdict.json and curve.png. Exit code: 0 PASS, 1 error or FAIL, 2 INCONCLUSIVE or SUSPECT.
"""

from __future__ import annotations

import os
from argparse import Namespace

from te_plugin.config import ConfigError, compose, to_yaml, validate

HELP = "train a recipe and check its loss curve"
EXAMPLES = """examples:
  te-plugin train recipe=llama_tiny
  te-plugin train recipe=llama_tiny precision=bf16 layout=bshd track.run_name=baseline
  te-plugin train recipe=llama_tiny --cfg job                   print the resolved configuration, run nothing
  te-plugin train recipe=llama_tiny parallel=ddp schedule.micro_rows=1 --nproc 2   two processes on this machine, a row each
  te-plugin train recipe=llama_tiny run.dir=RUN_DIR run.resume=true
  te-plugin train --config-dir my_configs recipe=my_recipe      my_configs/recipe/my_recipe.yaml
  te-plugin train recipe=llama3_1_8b data.path=/data/c4 --prepare   make the run directory only, then on every node:
      torchrun --nnodes N --nproc-per-node 8 ... -m te_plugin.training.worker RUN_DIR"""


def add_arguments(parser) -> None:
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own group files: recipe/NAME.yaml, model/NAME.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe=NAME, group=choice and key=value")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration and stop")
    parser.add_argument("--nproc", type=int, metavar="N", help="processes on this machine, for parallel=ddp and fsdp2")
    parser.add_argument("--prepare", action="store_true", help="write the run directory, print its path and stop")


def run(args: Namespace) -> int:
    if args.cfg:
        print(to_yaml(compose(args.overrides, for_run=False, config_dir=args.config_dir)), end="")
        return 0
    _refuse_inside_torchrun(args)
    for override in args.overrides:
        if override.lstrip("+").startswith("accept."):
            raise ConfigError(f"{override}: acceptance settings mean nothing to train; leave it out")
    cfg = compose(args.overrides, config_dir=args.config_dir)
    _check_processes(cfg, args)

    from te_plugin.commands import launch
    from te_plugin.commands.report import print_plan_table
    from te_plugin.training.progress import say

    if args.prepare:
        print(launch.make_run_dir(cfg))
        return 0
    print_plan_table(cfg)
    run_dir = launch.make_run_dir(cfg)
    say(f"run directory: {run_dir}")
    if args.nproc is None:
        return launch.run_here(cfg, run_dir)
    return launch.run_processes(run_dir, args.nproc)


def _refuse_inside_torchrun(args: Namespace) -> None:
    if "RANK" in os.environ and not args.prepare:
        raise ConfigError("train was started by torchrun, and every rank would make its own run directory; start one launcher "
                          "with --nproc N, or make the directory once with train ... --prepare and give torchrun "
                          "-m te_plugin.training.worker RUN_DIR")


def _check_processes(cfg, args: Namespace) -> None:
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc {args.nproc}: at least one process is needed")
    if args.prepare:
        if args.nproc is not None:
            validate(cfg, world_size=args.nproc)
        return
    if cfg.parallel.name != "single" and args.nproc is None and cfg.adapter.name != "maxtext":
        raise ConfigError(f"parallel={cfg.parallel.name} needs the number of processes; add --nproc N (1 is allowed)")
    validate(cfg, world_size=args.nproc or 1)
