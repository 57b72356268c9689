"""Golden curves: recipes/<name>/golden.jsonl, the loss a recipe must reproduce, with its measured noise.

First line, a header: recipe and its hash, when and on what it was recorded, why (`reason`), and how the noise band was measured.
Then one line a step: step, tokens, loss, grad_norm, and the two bands: half-widths that the smoothed gap of a run may reach.
`band` is in nats; `norm_band` is for the natural logarithm of the ratio of gradient norms. val_loss where it was evaluated.

A band comes from twins: runs that differ from the golden one in ways that may only change rounding (another kernel, precision,
layout, number of processes or threads). At each step it is SAFETY times the largest smoothed gap that any twin has shown so far,
plus a floor. Data order and initial weights are equal, so gaps are paired and small.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_plugin.paths import recipes_dir

GOLDEN_FILE = "golden.jsonl"
WINDOW = 10  # steps over which gaps are averaged
SAFETY = 2.0
LOSS_FLOOR = 0.002  # nats
NORM_FLOOR = 0.02


class GoldenError(ValueError):
    """A golden curve cannot be read or recorded."""


@dataclass(frozen=True)
class Golden:
    """header: the first line; rows: one a step, step numbers rising."""

    header: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    _by_step: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "_by_step", {row["step"]: row for row in self.rows})

    @property
    def recipe_hash(self) -> str:
        return self.header["recipe_hash"]

    def row_at(self, step: int) -> Mapping[str, Any] | None:
        return self._by_step.get(step)

    def loss_at(self, step: int) -> float | None:
        row = self._by_step.get(step)
        return None if row is None else row["loss"]

    @classmethod
    def load(cls, path: Path | str) -> Golden:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        try:
            header, *rows = [json.loads(line) for line in lines if line]
            if header.get("golden") != 1:
                raise KeyError("golden")
            for key in ("recipe", "recipe_hash", "reason", "band"):
                header[key]
            for row in rows:
                for key in ("step", "tokens", "loss", "grad_norm", "band", "norm_band"):
                    row[key]
        except (json.JSONDecodeError, KeyError, ValueError) as error:
            raise GoldenError(f"{path} is no golden curve ({error}); record it again with check.mode=record") from error
        return cls(header, rows)

    def save(self, path: Path | str) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            for record in (self.header, *self.rows):
                file.write(json.dumps(record) + "\n")
        os.replace(temporary, path)


def golden_path(recipe: str) -> Path:
    return recipes_dir() / recipe / GOLDEN_FILE


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean over the last `window` values at each place (fewer at the start)."""
    found, total = [], 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        found.append(total / min(index + 1, window))
    return found


def gaps(
    rows: Sequence[Mapping[str, Any]], golden: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[float], list[float]]:
    """(steps, loss gaps, log ratios of gradient norms) of a run's metric rows against golden rows, at common steps."""
    by_step = {row["step"]: row for row in golden}
    common = [(row, by_step[row["step"]]) for row in rows if row["step"] in by_step]
    steps = [row["step"] for row, _ in common]
    loss = [row["train/loss"] - gold["loss"] for row, gold in common]
    norm = [_log_ratio(row["train/grad_norm"], gold["grad_norm"]) for row, gold in common]
    return steps, loss, norm


def build(
    header: Mapping[str, Any], run: Sequence[Mapping[str, Any]], twins: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Golden:
    """A golden curve from a run's metric rows and those of its twins (name -> rows). GoldenError when a twin does not fit."""
    if not twins:
        raise GoldenError("a noise band is measured, not guessed: give at least one twin run")
    rows = [
        {
            "step": r["step"],
            "tokens": r["train/tokens"],
            "loss": r["train/loss"],
            "grad_norm": r["train/grad_norm"],
            **({"val_loss": r["val/loss"]} if "val/loss" in r else {}),
        }
        for r in run
    ]
    bands = {"loss": [0.0] * len(rows), "norm": [0.0] * len(rows)}
    measured = {}
    for name, twin in twins.items():
        steps, loss, norm = gaps(twin, rows)
        if len(steps) != len(rows):
            raise GoldenError(
                f"twin {name} has {len(steps)} of the {len(rows)} steps; it must be a whole run of the same schedule"
            )
        for kind, values in (("loss", smoothed(loss)), ("norm", smoothed(norm))):
            if not all(math.isfinite(v) for v in values):
                raise GoldenError(f"twin {name} has a non-finite {kind}")
            bands[kind] = [max(a, abs(b)) for a, b in zip(bands[kind], values, strict=True)]
        measured[name] = {
            "largest_smoothed_gap": max(map(abs, smoothed(loss))),
            "largest_step_gap": max(map(abs, loss)),
            "largest_smoothed_norm_gap": max(map(abs, smoothed(norm))),
        }
    for kind, key, floor in (("loss", "band", LOSS_FLOOR), ("norm", "norm_band", NORM_FLOOR)):
        highest = 0.0
        for index, row in enumerate(rows):
            # A run may be ahead of or behind its twins, except at the start: equal weights give equal first steps.
            highest = max(highest, *bands[kind][index : index + 1 + min(index, WINDOW)])
            row[key] = round(SAFETY * highest + floor, 6)
    how = (
        f"{SAFETY:g} x the largest {WINDOW}-step mean gap of any twin up to {WINDOW} steps ahead, "
        f"plus {LOSS_FLOOR} nats ({NORM_FLOOR} for the log of the gradient norm)"
    )
    return Golden(
        {"golden": 1, **header, "band": {"how": how, "window": WINDOW, "safety": SAFETY, "twins": measured}}, rows
    )


def _log_ratio(a: float, b: float) -> float:
    return math.log(a / b) if a > 0 and b > 0 else math.inf
