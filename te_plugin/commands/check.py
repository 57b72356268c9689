"""Run each kernel that a recipe plans, on the recipe's shapes and segments, against the float64 oracle. Exit code 1 when one
of them is outside its bound.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from rich import box
from rich.console import Console
from rich.table import Table

HELP = "check a recipe's kernels against the float64 oracle"
EXAMPLES = """examples:
  te-plugin check recipe=llama_tiny
  te-plugin check recipe=llama_tiny precision=fp8_block attention.dq_accumulation=bf16
  te-plugin check recipe=llama_moe_tiny"""


def add_arguments(parser) -> None:
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own group files: recipe/NAME.yaml, model/NAME.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe=NAME, group=choice, key=value")


def run(args: Namespace) -> int:
    from te_plugin.config import compose
    from te_plugin.recipe_check import check

    cfg = compose(args.overrides, config_dir=args.config_dir)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(box=box.SIMPLE_HEAD, title=f"check of {cfg.recipe}")
    for heading in ("op", "kernel", "output", "compared", "error", "cosine", "bound", ""):
        table.add_column(heading, no_wrap=True)
    failed = total = 0
    with console.status("checking") as status:
        for row in check(cfg):
            total += 1
            failed += not row.ok
            status.update(f"checked {row.label} {row.output}, {row.where}")
            numbers = f"{row.error:.1e}", f"{row.cosine:.6f}", f"{row.bound:.0e}"
            table.add_row(row.label, row.kernel, row.output, row.where, *numbers, "ok" if row.ok else "FAIL")
    console.print(table)
    print(f"check: {total - failed} of {total} comparisons are within their bounds")
    if failed:
        print(f"te-plugin check: {failed} comparisons are outside their bounds (marked FAIL above)", file=sys.stderr)
    return 1 if failed else 0
