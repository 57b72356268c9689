"""What every benchmark shares: interleaved timing, rows with correctness beside speed, the table, the JSON file, the picture.

Candidates take turns (a b c a b c ...), so that a machine that slows down slows all of them; a row shows the median and the
quartiles of its turns. A time without a relative error beside it is not reported.
"""

from __future__ import annotations

import datetime
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from te_plugin.training.environment import describe, write_json


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and quartiles over `turns` turns."""

    median: float
    low: float
    high: float
    turns: int


@dataclass
class Row:
    """One line of a result file. case spells shapes and segment lengths; rel_error is against float64.

    best_peer and ratio_to_best_peer (its time / this time, above 1 when this one is faster) are filled in by rank().
    cpu_us: what a call costs before its kernel starts, measured on inputs too small for the kernel to matter.
    start_us: the part of cpu_us until the first kernel of the call begins.
    of_copy: rate / rate of a copy in the same turns, where both are bytes per second: the fraction of the bandwidth reached.
    """

    op: str
    case: str
    kernel: str
    ours: bool
    ms: float
    ms_low: float
    ms_high: float
    rate: float
    unit: str
    rel_error: float
    best_peer: str | None = None
    ratio_to_best_peer: float | None = None
    cpu_us: float | None = None
    turns: int = 0
    of_copy: float | None = None
    start_us: float | None = None


def interleaved(
    candidates: Mapping[str, Callable[[], object]], seconds: float = 3.0, least: int = 5, most: int = 200,
    device: str | torch.device = "cpu", turn_ms: float = 1.0,
) -> dict[str, Timing]:
    """Time every candidate in turn for about `seconds` seconds in all, `least` to `most` turns each, after one warm-up turn.

    A turn of a short call repeats it until it lasts `turn_ms`. On a GPU each turn ends with a synchronisation; calls within a
    turn are launched while earlier ones still run, as the layers of a training step are.
    """
    device = torch.device(device)
    repeats = {name: _repeats(call, device, turn_ms) for name, call in candidates.items()}
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    collecting = gc.isenabled()
    gc.disable()  # a collection would land on one candidate by chance
    try:
        start = time.perf_counter()
        while len(next(iter(taken.values()))) < most:
            for name, call in candidates.items():
                taken[name].append(_timed(call, repeats[name], device))
            if len(taken[name]) >= least and time.perf_counter() - start > seconds:
                break
    finally:
        if collecting:
            gc.enable()
    return {name: _timing(turns) for name, turns in taken.items()}


def call_cost_us(call: Callable[[], object], device: str | torch.device = "cpu", turns: int = 300) -> float:
    """Microseconds of one call on tiny inputs, the median of many; on a GPU the kernels' own time is not waited for."""
    for _ in range(20):
        call()
    _synchronize(torch.device(device))
    taken = []
    for _ in range(turns):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    _synchronize(torch.device(device))
    return float(np.median(taken)) * 1e6


def relative_error(got: torch.Tensor, want: np.ndarray) -> float:
    """||got - want|| / ||want|| in float64; infinite when got is not finite."""
    got = got.detach().double().cpu().numpy()
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def rank(rows: Sequence[Row]) -> None:
    """Fill in best_peer and ratio_to_best_peer: the fastest row of somebody else's for the same op and case."""
    for row in rows:
        peers = [other for other in rows if other.op == row.op and other.case == row.case and not other.ours and other is not row]
        if peers:
            best = min(peers, key=lambda peer: peer.ms)
            row.best_peer, row.ratio_to_best_peer = best.kernel, best.ms / row.ms


@dataclass
class Report:
    """The rows of one benchmark and where they were measured. details: what a benchmark adds to its JSON file beside them."""

    name: str
    device: torch.device
    rows: list[Row] = field(default_factory=list)
    details: dict = field(default_factory=dict)

    def __post_init__(self):
        self.environment = describe(self.device, world_size=1)

    @property
    def hardware(self) -> str:
        gpus = self.environment["gpus"]
        threads = f"{self.environment['torch_threads']} threads"
        return gpus[0] if gpus else f"{self.environment['cpu']}, {threads}"

    def folder(self, root: Path) -> Path:
        """root/<machine>: the GPU's or the processor's name in lower case."""
        name = self.environment["gpus"][0] if self.environment["gpus"] else self.environment["cpu"]
        return root / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

    def as_json(self) -> dict:
        rank(self.rows)
        return {
            "hardware": self.hardware, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": self.environment["git"], "versions": self.environment["versions"],
            "rows": [_rounded(row) for row in self.rows],
            **({"details": self.details} if self.details else {}),
        }

    def write(self, root: Path) -> list[Path]:
        """root/<machine>/<name>.json and .png."""
        folder = self.folder(root)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{self.name}.json", self.as_json())
        draw(self.rows, folder / f"{self.name}.png", f"{self.name} on {self.hardware}")
        return [folder / f"{self.name}.json", folder / f"{self.name}.png"]

    def print(self, console: Console) -> None:
        rank(self.rows)
        table = Table(box=box.SIMPLE_HEAD, title=f"{self.name} on {self.hardware}", title_justify="left")
        for column in ("op", "case", "kernel"):
            table.add_column(column)
        for column in ("ms", "quartiles", "rate", "rel. error", "time/ours", "call us"):
            table.add_column(column, justify="right")
        against_copy = any(row.of_copy is not None for row in self.rows)
        to_start = any(row.start_us is not None for row in self.rows)
        if to_start:
            table.add_column("start us", justify="right")
        if against_copy:
            table.add_column("of copy", justify="right")
        last = None
        for row in self.rows:
            if last is not None and (row.op, row.case) != last:
                table.add_section()
            ours = [other.ms for other in self.rows if other.ours and (other.op, other.case) == (row.op, row.case)]
            ratio = f"{row.ms / min(ours):.2f}" if ours and not row.ours else ""
            head = (row.op, row.case) if (row.op, row.case) != last else ("", "")
            table.add_row(*head, row.kernel, f"{row.ms:.3f}", f"{row.ms_low:.3f}-{row.ms_high:.3f}", f"{row.rate:.4g} {row.unit}",
                          f"{row.rel_error:.1e}", ratio, "" if row.cpu_us is None else f"{row.cpu_us:.1f}",
                          *(["" if row.start_us is None else f"{row.start_us:.1f}"] if to_start else []),
                          *(["" if row.of_copy is None else f"{row.of_copy:.2f}"] if against_copy else []),
                          style="bold" if row.ours else "")
            last = (row.op, row.case)
        console.print(table)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """One panel an op and case: bars of the median, whiskers at the quartiles, ours in colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.case), []).append(row)
    height = sum(0.55 + 0.3 * len(group) for group in groups.values()) + 0.4
    figure = Figure(figsize=(9, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[1 + len(group) for group in groups.values()])[:, 0]
    for axes, ((op, case), group) in zip(panels, groups.items(), strict=True):
        names, middle = [row.kernel for row in group], [row.ms for row in group]
        spread = [[row.ms - row.ms_low for row in group], [row.ms_high - row.ms for row in group]]
        axes.barh(names, middle, xerr=spread, color=["#1b6ca8" if row.ours else "#b9b9b9" for row in group], height=0.7)
        for i, row in enumerate(group):
            axes.text(row.ms_high, i, f" {row.ms:.3g} ms", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.set_title(f"{op}: {case}", fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms, median and quartiles; shorter is better", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _rounded(row: Row) -> dict:
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in asdict(row).items()}


def _timing(turns: Sequence[float]) -> Timing:
    low, median, high = (float(np.quantile(turns, q)) for q in (0.25, 0.5, 0.75))
    return Timing(median, low, high, len(turns))


def _repeats(call: Callable[[], object], device: torch.device, turn_ms: float) -> int:
    """The warm-up, and how often a turn must repeat the call to last turn_ms milliseconds."""
    call()
    return max(1, round(turn_ms * 1e-3 / max(_timed(call, 1, device), 1e-7)))


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
