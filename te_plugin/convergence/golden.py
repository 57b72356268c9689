"""Golden curves: recipes/<name>/golden.jsonl, the loss a recipe must reproduce, with its measured noise.

First line, a header: recipe and its hash, when and on what it was recorded, why (`reason`), and how the noise was measured.
Then one line per arm and step: arm, step, tokens, loss, grad_norm, band, norm_band (val_loss where it was evaluated). An arm is
one precision; the bands are half-widths that a run's smoothed gap may reach: nats, and the log of the ratio of gradient norms.

A band comes from twins: runs of the same precision that differ only in what may change rounding (another kernel, layout, split
into microbatches). At each step it is SAFETY times the largest smoothed gap that any twin has shown so far, plus a floor. Data
order and initial weights are equal, so gaps are paired: they start at zero and grow slowly, and damage shows long before it
would in the loss itself. A precision without an arm of its own is held to the recipe's own arm, within `wide_band`: SAFETY times
the largest gap between arms. So is an FP8 run of another adapter than the golden curve's: it scales other tensors (MaxText casts
q, k, v, gate and up one by one, Megatron casts them fused), which is another quantisation and not another rounding.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_plugin import numerics, records
from te_plugin.paths import recipes_dir

GOLDEN_FILE = "golden.jsonl"
WINDOW = 10  # steps over which gaps are averaged
SAFETY = 2.0
LOSS_FLOOR = 0.002  # nats
NORM_FLOOR = 0.02
_BANDS, _WIDE_BANDS = ("band", "norm_band"), ("wide_band", "wide_norm_band")

Rows = Sequence[Mapping[str, Any]]


class GoldenError(ValueError):
    """A golden curve cannot be read or recorded."""


@dataclass(frozen=True)
class Arm:
    """One reference curve. rows: one a step, with `band` and `norm_band`."""

    name: str
    rows: Rows
    _by_step: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "_by_step", {row["step"]: row for row in self.rows})

    def at(self, step: int) -> Mapping[str, Any] | None:
        return self._by_step.get(step)

    def loss_at(self, step: int) -> float | None:
        row = self._by_step.get(step)
        return None if row is None else row["loss"]


@dataclass(frozen=True)
class Golden:
    """header: the first line of the file; arms: precision -> curve. header["arm"] is the recipe's own precision."""

    header: Mapping[str, Any]
    arms: Mapping[str, Arm]

    @property
    def recipe_hash(self) -> str:
        return self.header["recipe_hash"]

    def arm_for(self, precision: str, adapter: str = "megatron") -> Arm:
        """The precision's own arm, or the recipe's arm with the wide bands (see the head of this file)."""
        same_casts = numerics.scaling(precision) is None or adapter == self.header.get("adapter", "megatron")
        if precision in self.arms and same_casts:
            return self.arms[precision]
        own = self.arms[self.header["arm"]]
        wide = [{**row, "band": row["wide_band"], "norm_band": row["wide_norm_band"]} for row in own.rows]
        return Arm(f"{own.name} (wide: no arm of {precision}{'' if same_casts else f' with adapter={adapter}'})", wide)

    @classmethod
    def load(cls, path: Path | str) -> Golden:
        try:
            header, *rows = [records.parse(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
            if header.get("golden") != 1:
                raise KeyError("golden")
            missing = {"recipe", "recipe_hash", "reason", "band", "arm"} - set(header)
            if missing:
                raise KeyError(", ".join(sorted(missing)))
            arms: dict[str, list] = {}
            for row in rows:
                arms.setdefault(row["arm"], []).append(_checked(row, wide=row["arm"] == header["arm"]))
            if header["arm"] not in arms:
                raise KeyError(f"rows of arm {header['arm']}")
            for name, found in arms.items():
                if [row["step"] for row in found] != list(range(1, len(found) + 1)):
                    raise ValueError(f"the steps of arm {name} are not 1, 2, 3, ...: one is missing or stands more than once")
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise GoldenError(f"{path} is no golden curve ({error}); record it again with check.mode=record") from error
        return cls(header, {name: Arm(name, found) for name, found in arms.items()})

    def save(self, path: Path | str) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            for record in (self.header, *(row for arm in self.arms.values() for row in arm.rows)):
                file.write(json.dumps(record) + "\n")
        os.replace(temporary, path)


def _checked(row: Mapping[str, Any], wide: bool) -> Mapping[str, Any]:
    """A row whose numbers are finite and whose bands are above 0; wide: it belongs to the arm that others may be held to."""
    for key in ("loss", "grad_norm", *_BANDS, *(_WIDE_BANDS if wide else ())):
        value = row[key]
        if type(value) not in (int, float) or not math.isfinite(value) or (key.endswith("band") and value <= 0):
            raise ValueError(f"{key}={value!r} at step {row['step']} of arm {row['arm']}")
    return row


def golden_path(recipe: str) -> Path:
    return recipes_dir() / recipe / GOLDEN_FILE


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean over the last `window` values at each place (fewer at the start)."""
    return [math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def gaps(rows: Rows, reference: Rows) -> tuple[list[int], list[float], list[float]]:
    """(steps, loss gaps, log ratios of gradient norms) of a run's metric rows against golden rows, at common steps."""
    by_step = {row["step"]: row for row in reference}
    common = [(row, by_step[row["step"]]) for row in rows if row["step"] in by_step]
    steps = [row["step"] for row, _ in common]
    loss = [row["train/loss"] - gold["loss"] for row, gold in common]
    norm = [_log_ratio(row["train/grad_norm"], gold["grad_norm"]) for row, gold in common]
    return steps, loss, norm


def build(header: Mapping[str, Any], runs: Mapping[str, Rows], twins: Mapping[str, Mapping[str, Rows]]) -> Golden:
    """A golden curve from metric rows. runs: arm -> its run, the recipe's own precision first; twins: arm -> name -> rows.

    GoldenError when an arm has no twin, or a run is not whole and finite.
    """
    own = next(iter(runs))
    curves = {name: [_golden_row(name, row) for row in rows] for name, rows in runs.items()}
    measured: dict[str, Any] = {}
    for name, rows in curves.items():
        if not twins.get(name):
            raise GoldenError(f"arm {name}: a noise band is measured, not guessed; give at least one twin run")
        measured[name] = _set_bands(rows, twins[name], _BANDS)
    others = {name: runs[name] for name in runs if name != own} or twins[own]
    measured["between arms"] = _set_bands(curves[own], others, _WIDE_BANDS)
    for row in curves[own]:
        row["wide_band"] = max(row["wide_band"], row["band"])
        row["wide_norm_band"] = max(row["wide_norm_band"], row["norm_band"])
    how = (
        f"{SAFETY:g} x the largest {WINDOW}-step mean gap of any twin up to {WINDOW} steps ahead, "
        f"plus {LOSS_FLOOR} nats ({NORM_FLOOR} for the log of the gradient norm)"
    )
    band = {"how": how, "window": WINDOW, "safety": SAFETY, "measured": measured}
    return Golden(
        {"golden": 1, **header, "arm": own, "band": band}, {name: Arm(name, rows) for name, rows in curves.items()}
    )


def _golden_row(arm: str, row: Mapping[str, Any]) -> dict[str, Any]:
    found = {"arm": arm, "step": row["step"], "tokens": row["train/tokens"], "loss": row["train/loss"]}
    found["grad_norm"] = row["train/grad_norm"]
    if "val/loss" in row:
        found["val_loss"] = row["val/loss"]
    return found


def _set_bands(rows: list[dict[str, Any]], twins: Mapping[str, Rows], keys: tuple[str, str]) -> dict[str, Any]:
    """Give every golden row its two bands; returns the largest gaps of each twin."""
    largest = {key: [0.0] * len(rows) for key in keys}
    measured = {}
    for name, twin in twins.items():
        steps, loss, norm = gaps(twin, rows)
        if len(steps) != len(rows):
            raise GoldenError(f"twin {name} has {len(steps)} of the {len(rows)} steps; it must be a whole run")
        for key, values in zip(keys, (smoothed(loss), smoothed(norm)), strict=True):
            if not all(map(math.isfinite, values)):
                raise GoldenError(f"twin {name} has a loss or gradient norm that is not finite")
            largest[key] = [max(a, abs(b)) for a, b in zip(largest[key], values, strict=True)]
        measured[name] = {
            "loss": round(max(map(abs, smoothed(loss))), 6),
            "loss_one_step": round(max(map(abs, loss)), 6),
            "norm": round(max(map(abs, smoothed(norm))), 6),
        }
    for key, floor in zip(keys, (LOSS_FLOOR, NORM_FLOOR), strict=True):
        highest = 0.0
        for index, row in enumerate(rows):
            # A run may be ahead of its twins or behind them, except at the start: equal weights give equal first steps.
            highest = max(highest, *largest[key][index : index + 1 + min(index, WINDOW)])
            row[key] = round(SAFETY * highest + floor, 6)
    return measured


def _log_ratio(a: float, b: float) -> float:
    return math.log(a) - math.log(b) if a > 0 and b > 0 else math.inf
