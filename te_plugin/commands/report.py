"""The plan of a run as tables for people: which kernel each op takes, its layout and scratch, and why not the others."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from te_plugin.config import Config, target_arch
from te_plugin.plan import Plan, PlanError, Target, plan, registered


@dataclass(frozen=True)
class Row:
    """One kernel launch of a run. plan is None when no kernel can do it; `error` says why."""

    label: str
    problem: object
    plan: Plan | None
    rejected: tuple[tuple[str, str], ...]
    error: str | None = None


def console() -> Console:
    """Wide enough for reasons when the output goes to a file or a pipe. No markup: it would eat the [cudnn] of a reason."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def plan_rows(cfg: Config) -> list[Row]:
    """Every launch of the run with its plan, or with the reason why there is none."""
    from te_plugin.ops.recipe import parts_of, problems_of

    target, rows = plan_target(cfg), []
    for label, problem in problems_of(cfg):
        row = _plan_row(cfg, label, problem, target)
        parts = [] if row.plan is None else parts_of(label, row.plan)
        rows += [row, *(_plan_row(cfg, name, part, target) for name, part in parts)]
    return rows


def _plan_row(cfg: Config, label: str, problem, target: Target) -> Row:
    kernel = cfg.attention.kernel if problem.op == "attention" else "auto"
    asked = None if kernel == "auto" else kernel
    try:
        made = plan(problem, target, kernel, cfg.run.fallback)
    except PlanError as error:
        return Row(label, problem, None, reasons(problem, target, asked), str(error))
    rejected = made.rejected if asked is None else tuple(row for row in reasons(problem, target, asked) if row[0] != asked)
    return Row(label, problem, made, rejected)


def plan_target(cfg: Config) -> Target:
    """What ops.recipe.run_target says; without torch, which alone could see a GPU, this machine is a CPU."""
    from te_plugin.ops.recipe import ADAPTER_FRAMEWORK, run_target

    arch = target_arch(cfg)  # says clearly when the machine to plan for is not known
    if cfg.run.target == "auto" and importlib.util.find_spec("torch") is None:
        return Target(arch, ADAPTER_FRAMEWORK[cfg.adapter.name], local=True)
    return run_target(cfg)


def reasons(problem, target: Target, asked: str | None = None) -> tuple[tuple[str, str], ...]:
    """(kernel, why it is not taken), as if none was; asked: the one kernel that was asked for by name."""
    found = []
    for kernel in registered(problem.op):
        answer = kernel.supports(problem, target)
        if not answer:
            why = answer.reason
        elif asked not in (None, kernel.name):
            why = f"kernel={asked} was asked for"
        else:
            why = "framework maths is a fallback on a GPU and run.fallback=error"
        found.append((kernel.name, why))
    return tuple(found)


def print_plan_table(cfg: Config, rows: list[Row] | None = None, with_rejected: bool = False) -> None:
    """One line for all launches that share their op, kernel and reasons."""
    rows = plan_rows(cfg) if rows is None else rows
    table = Table(title=f"plan of {cfg.recipe} for {target_arch(cfg)}", box=box.SIMPLE_HEAD, title_justify="left")
    for heading, justify in (("op", "left"), ("launches", "left"), ("kernel", "left"), ("layout", "left"), ("scratch", "right")):
        table.add_column(heading, justify=justify, overflow="fold")
    if with_rejected:
        table.add_column("not taken, and why", overflow="fold")
    for group in _alike(rows):
        first = group[0]
        cells = [first.problem.op, shorten([row.label for row in group])]
        if first.plan is None:
            cells += [Text("none", style="bold red"), "no kernel can run it", ""]
        else:
            kernel, note = first.plan.kernel, first.plan.note
            if first.plan.is_fallback:
                note = f"FALLBACK: {note}" if note else "FALLBACK"
            layout = kernel.describe_layout(first.problem)
            cells += [kernel.name, "; ".join(filter(None, (layout, note))),
                      size(sum(row.plan.scratch_bytes for row in group))]
        if with_rejected:
            cells.append("\n".join(f"{name}: {why}" for name, why in first.rejected) or "-")
        table.add_row(*cells)
    console().print(table)


def _alike(rows: list[Row]) -> list[list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        made = row.plan and (row.plan.kernel.name, row.plan.note, row.plan.kernel.describe_layout(row.problem))
        groups.setdefault((row.problem.op, made, row.rejected), []).append(row)
    return list(groups.values())


def shorten(labels: list[str]) -> str:
    """linear_qkv.forward, linear_qkv.dgrad, linear_fc1.forward, linear_fc1.dgrad -> linear_{qkv,fc1}.{forward,dgrad}"""
    heads = list(dict.fromkeys(label.partition(".")[0] for label in labels))
    tails = list(dict.fromkeys(label.partition(".")[2] for label in labels))
    if len(labels) == 1 or len(heads) * len(tails) != len(labels):
        return ", ".join(labels)
    return ".".join(filter(None, (_braces(heads), _braces(tails))))


def _braces(words: list[str]) -> str:
    if len(words) == 1:
        return words[0]
    common = os.path.commonprefix(words)
    common = common[:common.rfind("_") + 1]
    return f"{common}{{{','.join(word[len(common):] for word in words)}}}"


def size(nbytes: int) -> str:
    """Bytes for people: 512 B, 1.5 KiB, 2.25 GiB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
