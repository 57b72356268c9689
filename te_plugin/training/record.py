"""check.mode=record: run a recipe's twins, measure the noise band from them, and write the recipe's golden curve.

Twins differ from the golden run only in what may change rounding, never the model or the data: other precisions, framework
maths instead of the attention kernel, another split into microbatches. What the configuration cannot run is left out.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from te_plugin.config import Config, ConfigError, validate
from te_plugin.convergence import golden as gold
from te_plugin.convergence.check import RunFacts
from te_plugin.convergence.verdict import Verdict
from te_plugin.training.environment import describe
from te_plugin.training.metrics import read_metrics

PRECISIONS = ("bf16", "fp8_current", "fp8_delayed")


def twins(cfg: Config, dp_size: int) -> Iterator[tuple[str, Config]]:
    """(name, configuration) of every twin that this configuration can run."""
    quiet = replace(
        cfg, check=replace(cfg.check, mode="off", reason=None), track=replace(cfg.track, mode="jsonl", entity=None)
    )
    micro, share = cfg.schedule.micro_rows, cfg.schedule.global_rows // dp_size
    other_micro = next((m for m in (micro // 2, micro * 2) if m and share % m == 0), None)
    candidates = [
        (f"precision={p}", replace(quiet, precision=replace(cfg.precision, name=p)))
        for p in PRECISIONS
        if p != cfg.precision.name
    ]
    if cfg.attention.kernel != "composite":
        attention = replace(cfg.attention, kernel="composite")
        candidates.append(
            ("attention=composite", replace(quiet, attention=attention, run=replace(cfg.run, fallback="allow")))
        )
    if other_micro is not None:
        candidates.append(
            (
                f"schedule.micro_rows={other_micro}",
                replace(quiet, schedule=replace(cfg.schedule, micro_rows=other_micro)),
            )
        )
    for name, twin in candidates:
        try:
            validate(twin, world_size=dp_size * cfg.parallel.tensor_parallel)
        except ConfigError:
            continue
        yield name, twin


def record(
    cfg: Config,
    run_dir: Path,
    facts: RunFacts,
    device,
    world_size: int,
    dp_size: int,
    run_twin: Callable[[Config, Path], Verdict],
    is_main: bool,
) -> Verdict:
    """Run every twin (all ranks call this), then write the golden curve on rank 0; returns the run's verdict."""
    measured = {}
    for name, twin in twins(cfg, dp_size):
        folder = run_dir / "twins" / name.replace("=", "-")
        if is_main:
            print(f"noise band: twin {name}", flush=True)
        verdict = run_twin(twin, folder)
        if verdict.status != "PASS":
            return Verdict("FAIL", f"no golden curve was recorded: twin {name} gave {verdict.line}", {"twin": name})
        if is_main:
            measured[name] = read_metrics(folder)
    if not is_main:
        return Verdict("PASS")
    environment = describe(device, world_size)
    header = {
        "recipe": cfg.recipe,
        "recipe_hash": facts.recipe_hash,
        "order_hash": facts.order_hash,
        "init_hash": facts.init_hash,
        "created": datetime.date.today().isoformat(),
        "reason": cfg.check.reason,
        "precision": cfg.precision.name,
        "layout": cfg.layout.name,
        "versions": environment["versions"],
        "cpu": environment["cpu"],
        "gpus": environment["gpus"],
        "context_free_entropy": facts.context_free_entropy,
    }
    try:
        golden = gold.build(header, read_metrics(run_dir), measured)
        path = gold.golden_path(cfg.recipe)
        golden.save(path)
    except (gold.GoldenError, OSError) as error:
        return Verdict("FAIL", f"no golden curve was recorded: {error}")
    return Verdict(
        "PASS",
        f"golden curve recorded at {path}",
        {"golden": dict(golden.header), "note": "this run is the golden curve"},
    )
