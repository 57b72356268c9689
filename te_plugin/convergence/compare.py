"""compare_runs(a, b, out): what two runs had configured differently, and how far their curves are apart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_plugin.convergence.golden import WINDOW, smoothed
from te_plugin.convergence.verdict import read_json


@dataclass(frozen=True)
class Comparison:
    """config: dotted key -> (a, b); gap: step -> loss b - loss a; smoothed: its mean over WINDOW steps. comparable: same data
    order and initial weights, so that the gap is paired."""

    config: dict[str, tuple[Any, Any]]
    steps: list[int]
    gap: list[float]
    smoothed: list[float]
    comparable: bool
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "config": {key: list(pair) for key, pair in self.config.items()},
            "comparable": self.comparable,
            "notes": self.notes,
            "steps": len(self.steps),
            "last_smoothed_gap": self.smoothed[-1],
            "largest_smoothed_gap": max(self.smoothed, key=abs),
            "largest_step_gap": max(self.gap, key=abs),
            "identical": all(g == 0 for g in self.gap),
        }

    def lines(self) -> list[str]:
        """What `te-plugin compare` prints."""
        found = [f"  {key}: {a} -> {b}" for key, (a, b) in self.config.items()] or ["  nothing"]
        summary = self.to_json()
        gap = (
            "every step is bit-equal"
            if summary["identical"]
            else (
                f"last {self.smoothed[-1]:+.5f}, largest {summary['largest_smoothed_gap']:+.5f} nats ({WINDOW}-step means)"
            )
        )
        return ["configured differently:", *found, f"loss gap over {len(self.steps)} common steps: {gap}", *self.notes]


def differing_hashes(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The hashes of env.json in which two runs differ that have to be paired: rows, text, initial weights. Older runs have none
    of their text, which is then taken for the same.
    """
    differ = [key for key in ("order_hash", "token_hash", "init_hash") if one.get(key) != other.get(key)]
    return [key for key in differ if key != "token_hash" or None not in (one.get(key), other.get(key))]


def compare_runs(a: Path | str, b: Path | str, out: Path | str | None = None) -> Comparison:
    """Compare two run directories; with `out`, write OUT/compare.json and OUT/compare.png.

    FileNotFoundError or ValueError with one clear message when a folder is no run or no step is common.
    """
    from te_plugin.config import differences, load
    from te_plugin.training.metrics import METRICS_FILE, read_metrics

    a, b = Path(a), Path(b)
    for folder in (a, b):
        for name in ("config.resolved.yaml", METRICS_FILE):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} is not a run directory: it has no {name}")
    rows = [read_metrics(folder, ("train/loss",)) for folder in (a, b)]
    by_step = {row["step"]: row["train/loss"] for row in rows[0]}
    common = [(row["step"], row["train/loss"] - by_step[row["step"]]) for row in rows[1] if row["step"] in by_step]
    if not common:
        raise ValueError(f"{a} and {b} have no step in common")
    gap = [g for _, g in common]
    if not all(math.isfinite(g) for g in gap):
        raise ValueError(f"{a} or {b} has a loss that is not finite: nothing to compare")
    names = {"order_hash": "data order", "token_hash": "the text", "init_hash": "initial weights"}
    unpaired = differing_hashes(_environment(a), _environment(b))
    notes = [f"{names[key]} differs: the curves are not paired" for key in unpaired]
    config = differences(load(a / "config.resolved.yaml"), load(b / "config.resolved.yaml"))
    config.pop("run.dir", None)
    found = Comparison(config, [s for s, _ in common], gap, smoothed(gap), not notes, notes)
    if out is not None:
        from te_plugin.convergence.pictures import draw_pair

        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "compare.json").write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
        draw_pair(rows[0], rows[1], (a.name, b.name), out / "compare.png")
    return found


def _environment(folder: Path) -> dict[str, Any]:
    path = folder / "env.json"
    return read_json(path) if path.is_file() else {}
