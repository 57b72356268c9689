"""check.mode=record: run a recipe's arms and their twins, measure the noise bands, and write the recipe's golden curve.

An arm is a precision. A twin of an arm differs from it only in what may change rounding, never the model or the data: framework
maths instead of the attention kernel, the other layout, another split into microbatches. What the configuration cannot run is
left out; the header of the golden file names what was measured. Finished runs are kept: an interrupted recording continues.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from te_plugin.config import Config, ConfigError, validate
from te_plugin.convergence import golden as gold
from te_plugin.convergence.check import RunFacts
from te_plugin.convergence.verdict import VERDICT_FILE, Verdict
from te_plugin.training.distributed import World
from te_plugin.training.environment import describe
from te_plugin.training.metrics import read_metrics
from te_plugin.training.progress import say

PRECISIONS = ("bf16", "fp8_current", "fp8_delayed")


def arms(cfg: Config, world: World) -> Iterator[Config]:
    """The recipe's own precision first, then the others that it can run."""
    quiet = replace(
        cfg, check=replace(cfg.check, mode="off", reason=None), track=replace(cfg.track, mode="jsonl", entity=None)
    )
    yield quiet
    for name in PRECISIONS:
        arm = replace(quiet, precision=replace(cfg.precision, name=name, forward_accumulation="fp32"))
        if name != cfg.precision.name and _runs(arm, world):
            yield arm


def twins(arm: Config, world: World) -> Iterator[tuple[str, Config]]:
    """(name, configuration) of every twin of an arm that can run."""
    micro, share = arm.schedule.micro_rows, arm.schedule.global_rows // world.dp_size
    candidates = []
    if arm.attention.kernel != "composite":
        attention = replace(arm.attention, kernel="composite")
        candidates.append(
            ("attention=composite", replace(arm, attention=attention, run=replace(arm.run, fallback="allow")))
        )
    other = "bshd" if arm.layout.name == "thd" else "thd"
    candidates.append((f"layout={other}", replace(arm, layout=replace(arm.layout, name=other))))
    for rows in (micro // 2, micro * 2):
        if rows and share % rows == 0:
            candidates.append(
                (f"schedule.micro_rows={rows}", replace(arm, schedule=replace(arm.schedule, micro_rows=rows)))
            )
    yield from ((name, twin) for name, twin in candidates if _runs(twin, world))


def record(
    cfg: Config,
    run_dir: Path,
    facts: RunFacts,
    world: World,
    run_twin: Callable[[Config, Path], Verdict],
) -> Verdict:
    """Run what is not run yet (all ranks call this), then write the golden curve on rank 0; returns the run's verdict."""
    runs: dict[str, Any] = {}
    measured: dict[str, dict[str, Any]] = {}
    for index, arm in enumerate(arms(cfg, world)):
        precision = arm.precision.name
        wanted = [("", arm)] if index else []  # the first arm is the run itself
        for name, configuration in (*wanted, *twins(arm, world)):
            folder = run_dir / "twins" / f"{precision}-{name or 'arm'}".replace("=", "-")
            if not world.broadcast_object(_passed(folder)):
                if world.is_main:
                    say(f"noise band: precision={precision} {name}")
                verdict = run_twin(configuration, folder)
                if verdict.status != "PASS":
                    return Verdict("FAIL", f"no golden curve was recorded: {folder.name} gave {verdict.line}")
            if not world.is_main:
                continue
            if name:
                measured.setdefault(precision, {})[name] = read_metrics(folder)
            else:
                runs[precision] = read_metrics(folder)
        if index == 0 and world.is_main:
            runs[precision] = read_metrics(run_dir)
    return _write(cfg, facts, world, runs, measured) if world.is_main else Verdict("PASS")


def _passed(folder: Path) -> bool:
    """Whether a twin is done; one that was interrupted, or that failed, runs again."""
    return (folder / VERDICT_FILE).exists() and Verdict.load(folder).status == "PASS"


def _write(cfg: Config, facts: RunFacts, world: World, runs: dict, measured: dict) -> Verdict:
    environment = describe(world.device, world.size)
    header = {
        "recipe": cfg.recipe, "recipe_hash": facts.recipe_hash, "order_hash": facts.order_hash,
        "init_hash": facts.init_hash, "created": datetime.date.today().isoformat(), "reason": cfg.check.reason,
        "layout": cfg.layout.name, "parallel": cfg.parallel.name, "processes": world.size,
        "context_free_entropy": facts.context_free_entropy, "cpu": environment["cpu"], "gpus": environment["gpus"],
        "versions": environment["versions"],
    }  # fmt: skip
    try:
        golden = gold.build(header, runs, measured)
        path = gold.golden_path(cfg.recipe)
        golden.save(path)
    except (gold.GoldenError, OSError) as error:
        return Verdict("FAIL", f"no golden curve was recorded: {error}")
    return Verdict("PASS", f"golden curve recorded at {path}", {"golden": dict(golden.header)})


def _runs(cfg: Config, world: World) -> bool:
    try:
        validate(cfg, world_size=world.size)
    except ConfigError:
        return False
    return True
