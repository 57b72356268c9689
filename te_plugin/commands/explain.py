"""Say what a run would do, without running it: the kernel of every op, layouts, scratch, every kernel not taken and why,
tokens a step, memory. target=ARCH plans for a machine that is not here. Exit code 1 when some op has no kernel.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from rich import box
from rich.table import Table

from te_plugin import numerics
from te_plugin.commands import memory, report
from te_plugin.config import Config, ConfigError, compose, recipe_hash, target_arch, validate

HELP = "say which kernels a run takes and why, tokens a step, memory"
EXAMPLES = """examples:
  te-plugin explain recipe=llama_tiny
  te-plugin explain recipe=llama_tiny target=sm90
  te-plugin explain recipe=llama3_1_8b target=sm90 --processes 8
  te-plugin explain recipe=llama_tiny attention.kernel=cpu attention.dq_accumulation=bf16
  te-plugin explain --matrix                                    which kernel can do what, on every target"""


def add_arguments(parser) -> None:
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own group files: recipe/NAME.yaml, model/NAME.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe=NAME, target=ARCH, group=choice, key=value")
    parser.add_argument("--processes", type=int, metavar="N", help="processes of the run, for its memory and microbatches")
    parser.add_argument("--matrix", action="store_true", help="print the support matrix of all kernels (Markdown)")


def run(args: Namespace) -> int:
    if args.matrix:
        if args.overrides or args.config_dir is not None or args.processes is not None:
            raise ConfigError("--matrix covers all kernels and targets, whatever the recipe; leave the other arguments out")
        from te_plugin.support_matrix import markdown

        print(markdown())
        return 0
    overrides = [f"run.{text}" if text.startswith("target=") else text for text in args.overrides]
    cfg = compose(overrides, for_run=False, config_dir=args.config_dir)
    if args.processes is not None:
        validate(cfg, for_run=False, world_size=args.processes)
    rows, processes = report.plan_rows(cfg), args.processes or cfg.parallel.tensor_parallel
    report.print_plan_table(cfg, rows, with_rejected=True)
    plans = [row.plan for row in rows if row.plan is not None]
    _print_sizes(cfg, memory.estimate(cfg, plans, processes), processes)
    impossible = [row for row in rows if row.plan is None]
    if impossible:
        named = ", ".join(dict.fromkeys(row.problem.op for row in impossible))
        allow = any("run.fallback=error" in why for row in impossible for _, why in row.rejected)
        print(f"te-plugin explain: {cfg.recipe} cannot run on {target_arch(cfg)}: {len(impossible)} of {len(rows)} launches have "
              f"no kernel ({named}); change what a reason names"
              f"{', or accept framework maths with run.fallback=allow' if allow else ''}",
              file=sys.stderr)
        return 1
    return 0


def _print_sizes(cfg: Config, kept: memory.MemoryEstimate, processes: int) -> None:
    schedule, tokens = cfg.schedule, cfg.schedule.global_rows * cfg.data.seq_len
    steps = schedule.tokens // tokens
    multiple = numerics.token_multiple(cfg.precision.name, cfg.parallel.tensor_parallel, cfg.parallel.context_parallel,
                                       cfg.parallel.sequence_parallel)
    micro = schedule.micro_rows * cfg.data.seq_len
    padded = "" if micro % multiple == 0 else f"; {micro:,} is padded inside to {-(-micro // multiple) * multiple:,}"
    table = Table(title="sizes", box=box.SIMPLE_HEAD, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")
    table.add_row("tokens a step", f"{tokens:,} = {schedule.global_rows} rows of {cfg.data.seq_len:,}; {steps:,} steps, "
                                   f"{schedule.tokens:,} tokens")
    microbatches = max(schedule.global_rows * cfg.parallel.tensor_parallel // (schedule.micro_rows * processes), 1)
    table.add_row("microbatch", f"{micro:,} tokens, {microbatches} a step and process")
    table.add_row("token multiple", f"{multiple} ({cfg.precision.name}){padded}")
    table.add_row("parameters", f"{kept.parameters:,}")
    table.add_row("memory, estimated", f"{report.size(kept.total)} a process ({processes}): weights {report.size(kept.weights)}, "
                  f"gradients {report.size(kept.gradients)}, optimizer {report.size(kept.optimizer)}, "
                  f"FP8 weight copies {report.size(kept.fp8_weights)}, activations {report.size(kept.activations)}, "
                  f"scratch {report.size(kept.scratch)}")
    table.add_row("recipe hash", recipe_hash(cfg))
    report.console().print(table)
