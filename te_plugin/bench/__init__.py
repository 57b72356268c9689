"""Benchmarks behind `te-plugin bench`, one module each, with run(Options) -> Report.

A new benchmark is a module here and an entry in BENCHMARKS; timing, table, JSON file and picture come from harness.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from te_plugin.config import ConfigError

# name -> device -> module. On a machine with a GPU the benchmark of the GPU is taken where there is one.
BENCHMARKS = {
    "attention": {"cpu": "te_plugin.bench.attention"},
    "calls": {"cpu": "te_plugin.bench.calls"},
    "quantize": {"cpu": "te_plugin.bench.quantize", "cuda": "te_plugin.bench.quantize_gpu"},
    "rope": {"cuda": "te_plugin.bench.rope"},
    "gemm": {"cuda": "te_plugin.bench.gemm"},
    "grouped": {"cuda": "te_plugin.bench.grouped"},
    "layer": {"cuda": "te_plugin.bench.layer"},
}


def module_of(name: str, has_gpu: bool) -> str | None:
    """The module of a benchmark on this machine; None when it needs a GPU that is not here."""
    devices = BENCHMARKS[name]
    return devices.get("cuda") if has_gpu and "cuda" in devices else devices.get("cpu")


@dataclass(frozen=True)
class Options:
    """cases and dtype narrow a benchmark down (empty and None: everything); seconds: for the turns of one op and case."""

    cases: tuple[str, ...] = ()
    dtype: str | None = None
    seconds: float = 3.0

    def __post_init__(self):
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"--seconds {self.seconds:g}: above 0, and finite; every candidate takes a few turns in any case")

    def select(self, names: Iterable[str], dtypes: Iterable[str]) -> None:
        """ConfigError when a case or dtype is asked for that the benchmark does not have."""
        for asked, known, what in ((self.cases, sorted(set(names)), "case"),
                                   ((self.dtype,) if self.dtype else (), sorted(set(dtypes)), "dtype")):
            for name in asked:
                if name not in known:
                    raise ConfigError(f"no {what} is named {name!r}; known: {', '.join(known)}")
