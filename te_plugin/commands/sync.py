"""Replay a run's metrics.jsonl into wandb: the same keys, the same steps, one run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from te_plugin.commands.compare import require_run_dir

HELP = "replay a run into wandb"
EXAMPLES = """examples:
  te-plugin sync runs/llama_tiny-20260101-120000
  te-plugin sync runs/llama_tiny-20260101-120000 --offline      a wandb run on disk, for wandb's own sync later"""


def add_arguments(parser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--offline", action="store_true", help="write wandb's files, send nothing")


def run(args: Namespace) -> int:
    require_run_dir(args.run_dir)
    from te_plugin.training.tracking import sync

    rows = sync(args.run_dir, mode="wandb_offline" if args.offline else "wandb")
    print(f"{args.run_dir}: {rows} rows")
    return 0
