"""Replay a run's metrics.jsonl into wandb: the same keys, the same steps, one run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from te_plugin.commands.compare import require_run_dir

HELP = "replay a run into wandb"
EXAMPLES = """examples:
  te-plugin sync runs/llama_tiny-20260101-120000"""


def add_arguments(parser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")


def run(args: Namespace) -> int:
    require_run_dir(args.run_dir)
    from te_plugin.training.tracking import sync

    return sync(args.run_dir)
