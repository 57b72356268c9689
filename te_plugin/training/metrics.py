"""metrics.jsonl: one JSON object per optimizer step, the truth about a run.

A row has an integer "step" (the number of optimizer updates done, so the first row of a run is 1) and named numbers. Steps
only go up. After a crash, `rewind()` drops the rows that the last checkpoint does not cover and a half-written last line, so a
resumed run has neither a gap nor a duplicate. JSON has no NaN: non-finite numbers are written as the strings "NaN",
"Infinity" and "-Infinity", which is also what wandb keeps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
CURVE = ("train/tokens", "train/loss", "train/grad_norm")  # what every row of a run has
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsError(ValueError):
    """A row cannot be logged, or a metrics file cannot be read. Nothing was dropped."""


def encode(value: Any) -> Any:
    """A JSON value: non-finite floats become strings, NumPy and torch scalars become Python numbers."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def decode(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def parse_line(line: bytes) -> dict[str, Any]:
    """The row of a line; ValueError when it holds none."""
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise ValueError("it has no whole number 'step'")
    return {key: decode(value) for key, value in row.items()}


def read_metrics(path: Path | str, needed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of a metrics file or of the run directory that holds it. needed: numbers that every row must have.

    A half-written last line (the process was killed inside a write) is ignored; damage anywhere else is an error.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            rows.append(parse_line(line))
            if len(rows) > 1 and rows[-1]["step"] <= rows[-2]["step"]:
                raise ValueError(f"step {rows[-1]['step']} after step {rows[-2]['step']}")
            if absent := [key for key in needed if type(rows[-1].get(key)) not in (int, float)]:
                raise ValueError(f"it has no number {absent[0]!r}")
        except ValueError as error:
            if number == len(lines):  # no newline after it: the write never finished
                break
            raise MetricsError(f"{path}:{number}: not a JSON row ({error}); the file was edited or damaged") from error
    return rows


class MetricsFile:
    """Appends rows to RUN/metrics.jsonl. A row reaches the kernel before `append` returns, so kill -9 cannot lose it."""

    def __init__(self, run_dir: Path | str):
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int | None = None
        if self.path.exists():
            rows = read_metrics(self.path)
            self.last_step = rows[-1]["step"] if rows else None
        self._file = None

    def append(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Write one row; returns it as written. MetricsError when its step does not follow the last one."""
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise MetricsError(f"a row needs an integer 'step', got {step!r}")
        if self.last_step is not None and step <= self.last_step:
            raise MetricsError(
                f"step {step} was logged after step {self.last_step}: steps only go up; "
                f"call resume({step}) first when the run was restarted from an older checkpoint"
            )
        encoded = {key: encode(value) for key, value in row.items()}
        for key, value in encoded.items():
            if not isinstance(value, (int, float, str)):
                raise MetricsError(
                    f"row {step}: {key!r} is {type(value).__name__}; a row holds numbers and strings only"
                )
        line = json.dumps(encoded, allow_nan=False) + "\n"
        if self._file is None:
            self._drop_partial_line()
            self._file = open(self.path, "a", encoding="utf-8")
        self._file.write(line)
        self._file.flush()
        self.last_step = step
        return encoded

    def _drop_partial_line(self) -> None:
        """Cut a last line that a killed writer left unfinished, so that the next row starts on its own line."""
        if not self.path.exists():
            return
        with open(self.path, "rb+") as file:
            data = file.read()
            if data and not data.endswith(b"\n"):
                file.truncate(data.rfind(b"\n") + 1)

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop every row from `step` on (and a half-written line); returns the rows that stay."""
        self.close()
        if not self.path.exists():
            self.last_step = None
            return []
        kept = [row for row in read_metrics(self.path) if row["step"] < step]
        temporary = self.path.with_suffix(".jsonl.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            for row in kept:
                file.write(json.dumps({key: encode(value) for key, value in row.items()}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        self.last_step = kept[-1]["step"] if kept else None
        return kept

    def sync(self) -> None:
        """Force the rows to the disk (at every checkpoint)."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
