"""The check at the end of a run: is it healthy, and does its curve equal the recipe's golden curve within the measured noise?

Gates, each with its numbers in verdict.json:
  health    every loss, held-out loss and gradient norm is finite
  learned   a finished run on real text ends below the entropy of its token frequencies (the loss without context)
  rows      metrics.jsonl has a row of every step
  contract  recipe hash, data order and initial weights are those of the golden curve
  curve     the smoothed paired loss gap stays inside the band at every step, above and below: a leak across documents lowers
            the loss, so a curve that is too good is as wrong as one that is too bad
  gradient  the same for the gradient norm: it sees a broken backward pass before the loss does
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from te_plugin.config import Config
from te_plugin.convergence.golden import WINDOW, Arm, Golden, gaps, golden_path, smoothed
from te_plugin.convergence.verdict import Verdict

MIN_STEPS = 2 * WINDOW  # a shorter run cannot be judged


@dataclass(frozen=True)
class RunFacts:
    """What is known about a run before its first step."""

    recipe_hash: str
    order_hash: str
    init_hash: str
    vocab_size: int
    planned_steps: int
    context_free_entropy: float | None
    token_hash: str | None = None


@dataclass(frozen=True)
class Gate:
    """passed None: the gate could not be asked."""

    name: str
    passed: bool | None
    message: str
    numbers: Mapping[str, Any]


def judge(cfg: Config, run_dir: Path, facts: RunFacts, golden: Golden | None, last_step: int) -> Verdict:
    """The verdict of a run directory whose run ended after last_step (metrics.jsonl is read, nothing else)."""
    from te_plugin.training.metrics import CURVE, METRICS_FILE, read_metrics

    rows = read_metrics(run_dir, CURVE) if (run_dir / METRICS_FILE).exists() else []
    gates = [health_gate(rows), rows_gate(rows, last_step), learned_gate(rows, facts)]
    note = ""
    if cfg.check.mode == "golden":
        gates += curve_gates(rows, facts, golden, cfg.recipe, cfg.precision.name, cfg.adapter.name)
    else:
        note = f"check.mode={cfg.check.mode}: the curve was not compared"
    return _combine(gates, rows, facts, golden if cfg.check.mode == "golden" else None, note)


def health_gate(rows: Sequence[Mapping[str, Any]]) -> Gate:
    # The loss of a step comes before its update: what the last update broke shows in the held-out loss alone.
    bad = [r["step"] for r in rows if not math.isfinite(r["train/loss"] + r["train/grad_norm"] + r.get("val/loss", 0.0))]
    if not rows:
        return Gate("health", False, "the run has no rows", {})
    message = (
        f"loss or gradient norm is not finite at step {bad[0]}" if bad else "every loss and gradient norm is finite"
    )
    return Gate("health", not bad, message, {"steps": len(rows), "non_finite_steps": len(bad)})


def rows_gate(rows: Sequence[Mapping[str, Any]], last_step: int) -> Gate:
    """Not judged where rows are missing: they were lost with the file that a resumed run continued, or were edited out."""
    if [row["step"] for row in rows] == list(range(1, last_step + 1)):
        return Gate("rows", True, "metrics.jsonl has a row of every step", {"rows": len(rows)})
    message = (
        f"metrics.jsonl has {len(rows)} rows of {last_step} steps: a curve with holes is not judged; restore the file and resume "
        f"the run, or start a new one"
    )
    return Gate("rows", None, message, {"rows": len(rows), "last_step": last_step})


def learned_gate(rows: Sequence[Mapping[str, Any]], facts: RunFacts) -> Gate:
    entropy = facts.context_free_entropy
    if entropy is None or not rows or rows[-1]["step"] < facts.planned_steps:
        return Gate("learned", None, "not asked: synthetic data or an unfinished run", {})
    final = _final_loss(rows)
    numbers = {"final_loss": final, "context_free_entropy": entropy}
    if final < entropy:
        return Gate(
            "learned", True, f"final loss {final:.4f} is below the token-frequency entropy {entropy:.4f}", numbers
        )
    if len(rows) < MIN_STEPS:
        return Gate("learned", None, f"not asked: {len(rows)} steps are too few", numbers)
    return Gate(
        "learned",
        False,
        f"final loss {final:.4f} is not below {entropy:.4f}, the entropy of the token frequencies: "
        f"the model learned nothing from context",
        numbers,
    )


def curve_gates(
    rows: Sequence[Mapping[str, Any]],
    facts: RunFacts,
    golden: Golden | None,
    recipe: str,
    precision: str,
    adapter: str = "megatron",
) -> list[Gate]:
    if golden is None:
        return [
            Gate(
                "contract",
                None,
                f"recipe {recipe} has no golden curve at {golden_path(recipe)}; record one with check.mode=record, "
                f"or set check.mode=off",
                {},
            )
        ]
    for what, mine, theirs in (
        ("recipe hash", facts.recipe_hash, golden.recipe_hash),
        ("data order", facts.order_hash, golden.header.get("order_hash")),
        ("initial weights", facts.init_hash, golden.header.get("init_hash")),
    ):
        if theirs is not None and mine != theirs:
            return [
                Gate(
                    "contract",
                    None,
                    f"the golden curve is for another {what} ({theirs}, this run has {mine}): the recipe changed, or "
                    f"its settings were overridden; set check.mode=off, or record a new curve with a reason",
                    {"run": mine, "golden": theirs},
                )
            ]
    contract = Gate(
        "contract",
        True,
        "recipe, data order and initial weights are the golden curve's",
        {"recipe_hash": facts.recipe_hash},
    )
    arm = golden.arm_for(precision, adapter)
    steps, loss, norm = gaps(rows, arm.rows)
    if len(steps) < len(rows):
        message = f"the golden curve has {len(arm.rows)} steps and the run {len(rows)}: the file is cut; restore it"
        return [contract, Gate("curve", None, message, {"steps": len(arm.rows)})]
    if len(steps) < MIN_STEPS:
        return [
            contract,
            Gate(
                "curve",
                None,
                f"{len(steps)} steps are too few to judge a curve; it takes {MIN_STEPS}",
                {"steps": len(steps)},
            ),
        ]
    return [
        contract,
        _band_gate("curve", "loss", steps, loss, arm, "band"),
        _band_gate("gradient", "log gradient norm", steps, norm, arm, "norm_band"),
    ]


def _band_gate(name: str, what: str, steps: Sequence[int], values: Sequence[float], arm: Arm, band_key: str) -> Gate:
    gap = smoothed(values)
    bands = [arm.at(step)[band_key] for step in steps]
    outside = [i for i, (g, b) in enumerate(zip(gap, bands, strict=True)) if not abs(g) <= b]
    worst = max(range(len(steps)), key=lambda i: abs(gap[i]) / bands[i] if math.isfinite(gap[i]) else math.inf)
    numbers = {
        "arm": arm.name,
        "steps": len(steps),
        "steps_outside": len(outside),
        "worst_step": steps[worst],
        "worst_gap": gap[worst],
        "band_there": bands[worst],
        "last_gap": gap[-1],
        "last_band": bands[-1],
        "largest_fraction_of_band": abs(gap[worst]) / bands[worst],
    }
    if not outside:
        return Gate(
            name,
            True,
            f"{what} stays within the band; largest gap {gap[worst]:+.4f} of {bands[worst]:.4f} at step {steps[worst]}",
            numbers,
        )
    first = outside[0]
    side = "above" if gap[first] > 0 else "below"
    hint = "" if gap[worst] > 0 or name != "curve" else " (too low: look for tokens that see other documents)"
    return Gate(
        name,
        False,
        f"{what} leaves the golden band at step {steps[first]}: {WINDOW}-step mean gap {gap[first]:+.4f} is {side} the "
        f"band of {bands[first]:.4f}; worst {gap[worst]:+.4f} of {bands[worst]:.4f} at step {steps[worst]}{hint}",
        numbers,
    )


def _combine(
    gates: Sequence[Gate], rows: Sequence[Mapping[str, Any]], facts: RunFacts, golden: Golden | None, note: str
) -> Verdict:
    details = {
        "gates": [asdict(g) for g in gates],
        "final_loss": _final_loss(rows) if rows else None,
        "facts": asdict(facts),
        "val_loss": next((r["val/loss"] for r in reversed(rows) if "val/loss" in r), None),
        "note": note,
        "golden": None
        if golden is None
        else {k: golden.header.get(k) for k in ("recipe", "recipe_hash", "created", "reason", "band")},
    }
    failed = [g for g in gates if g.passed is False]
    if failed:
        return Verdict("FAIL", "; ".join(f"{g.name}: {g.message}" for g in failed), details)
    open_gates = [g for g in gates if g.passed is None and g.name in ("rows", "contract", "curve", "gradient")]
    if open_gates:
        return Verdict("INCONCLUSIVE", "; ".join(g.message for g in open_gates), details)
    return Verdict("PASS", note or next(g.message for g in gates if g.name in ("curve", "health")), details)


def _final_loss(rows: Sequence[Mapping[str, Any]]) -> float:
    last = [r["train/loss"] for r in rows[-WINDOW:]]
    return sum(last) / len(last)
