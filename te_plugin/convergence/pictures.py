"""Pictures of curves: a run against its golden curve, and two runs against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from te_plugin.convergence.golden import WINDOW, Arm, gaps, smoothed

_RUN, _REFERENCE, _BAND, _GAP = "#1b6ca8", "#999999", "#cfe3c8", "#b5400f"


def draw_run(rows: Sequence[Mapping[str, Any]], path: Path | str, title: str, golden: Arm | None = None) -> None:
    """curve.png: the run's loss over the golden one; below, the smoothed gap and the band it must stay in."""
    figure, top, bottom = _figure(golden is not None)
    _losses(top, rows, "this run", _RUN)
    if golden is not None:
        top.plot(
            [r["step"] for r in golden.rows],
            [r["loss"] for r in golden.rows],
            color=_REFERENCE,
            lw=2.5,
            alpha=0.7,
            label=f"golden, {golden.name}",
            zorder=0,
        )
        steps, loss, _ = gaps(rows, golden.rows)
        band = [golden.at(s)["band"] for s in steps]
        bottom.fill_between(steps, [-b for b in band], band, color=_BAND, label="band")
        bottom.plot(steps, smoothed(loss), color=_GAP, lw=1.3, label=f"gap, mean of {WINDOW} steps")
        _zoom(bottom, band, smoothed(loss))
        _finish_gap(bottom)
    _finish(figure, top, path, title)


def draw_pair(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], names: tuple[str, str], path: Path | str
) -> None:
    """Two runs: losses above, the gap b - a below (each step, and its mean over WINDOW steps)."""
    figure, top, bottom = _figure(True)
    _losses(top, a, names[0], _REFERENCE)
    _losses(top, b, names[1], _RUN)
    by_step = {r["step"]: r["train/loss"] for r in a}
    common = [(r["step"], r["train/loss"] - by_step[r["step"]]) for r in b if r["step"] in by_step]
    steps, gap = [s for s, _ in common], [g for _, g in common]
    bottom.plot(steps, gap, color=_GAP, lw=0.6, alpha=0.4, label=f"{names[1]} - {names[0]}, each step")
    bottom.plot(steps, smoothed(gap), color=_GAP, lw=1.3, label=f"mean of {WINDOW} steps")
    _finish_gap(bottom)
    _finish(figure, top, path, f"{names[1]} against {names[0]}")


def _figure(two: bool):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6 if two else 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    if not two:
        return figure, figure.subplots(), None
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
    return figure, top, bottom


def _losses(axes, rows: Sequence[Mapping[str, Any]], name: str, color: str) -> None:
    axes.plot([r["step"] for r in rows], [r["train/loss"] for r in rows], color=color, lw=1.2, label=name)
    held_out = [(r["step"], r["val/loss"]) for r in rows if "val/loss" in r]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o", color=color, ms=4, label=f"{name}, held out")


def _zoom(axes, band: Sequence[float], gap: Sequence[float]) -> None:
    limit = max([*band, *(abs(g) for g in gap if g == g and abs(g) < float("inf"))], default=1.0) * 1.2
    axes.set_ylim(-limit, limit)


def _finish_gap(axes) -> None:
    axes.axhline(0, color="black", lw=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("gap (nats)")
    axes.legend(loc="upper left", fontsize=8)


def _finish(figure, top, path: Path | str, title: str) -> None:
    top.set_title(title)
    top.set_ylabel("loss (nats a token)")
    top.grid(alpha=0.3)
    top.legend(fontsize=8)
    figure.savefig(path)


def draw_acceptance(
    seeds: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]], delta: float | None, path: Path | str
) -> None:
    """Above: every arm's training loss; below: paired held-out gaps to BF16 with the delta that they must stay under."""
    figure, top, bottom = _figure(True)
    colors = {"bf16": _REFERENCE, "twin": "#5b9a3d", "candidate": _RUN, "saboteur": _GAP}
    for index, arms in enumerate(seeds):
        for name, rows in arms.items():
            label = name if index == 0 else None
            top.plot(
                [r["step"] for r in rows],
                [r["train/loss"] for r in rows],
                color=colors[name],
                lw=0.9,
                alpha=0.8,
                label=label,
            )
        reference = {r["step"]: r["val/loss"] for r in arms["bf16"] if "val/loss" in r}
        for name, rows in arms.items():
            points = [
                (r["step"], r["val/loss"] - reference[r["step"]])
                for r in rows
                if "val/loss" in r and r["step"] in reference
            ]
            if name != "bf16" and points:
                label = f"{name} - bf16" if index == 0 else None
                bottom.plot(
                    [s for s, _ in points], [g for _, g in points], "o-", ms=3, lw=0.8, color=colors[name], label=label
                )
    if delta is not None:
        bottom.axhspan(-delta, delta, color=_BAND, zorder=0, label="delta")
    _finish_gap(bottom)
    bottom.set_ylabel("held-out gap (nats)")
    _finish(figure, top, path, f"paired acceptance, {len(seeds)} seeds")
