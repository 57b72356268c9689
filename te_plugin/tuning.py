"""Which of several able kernels is faster: measured once per problem and GPU, kept on disk.

The file is ~/.cache/te_plugin/tuning/<gpu>.json, one for each kind of GPU. It says what it was made with (library build, driver,
framework versions); where that differs from what runs now, its choices are not used, and the next measurement rewrites it.

Every process must choose alike, or a run's ranks would add up results of different kernels. Two rules see to that:
- One machine: a choice is read from the file, and made under a lock on it. Whoever comes first measures; all others wait for the
  lock and then read what was chosen. An entry is never measured twice.
- One run: rank 0 measures what the run will ask before its first step, and its choices are handed to all ranks, whatever their
  own files say (`adopt`). From then on nothing is measured: a problem that was not foreseen takes the first kernel in the
  order, on every rank.

A kernel later in the order must be faster by more than MARGIN: what the clock cannot show twice shall not decide.
This file imports no framework. What runs a kernel and a clock is given to the Tuner (te_plugin/torch/tuning.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from te_plugin import records
from te_plugin.plan import Choice, Plan

FORMAT = 1
MARGIN = 0.02

Measure = Callable[[Any, tuple[Plan, ...]], Mapping[str, float]]


def cache_folder() -> Path:
    return Path.home() / ".cache" / "te_plugin" / "tuning"


def cache_path(gpu: str, folder: Path | None = None) -> Path:
    """The file of one kind of GPU, by its name."""
    return (folder or cache_folder()) / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def describe(path: Path) -> str:
    """A few words on a tuning file, for people."""
    try:
        content = records.parse(path.read_text(encoding="utf-8"))
        made_with = ", ".join(f"{name} {version}" for name, version in content["made_with"].items())
        return f"{len(content['choices'])} products, made with {made_with}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"damaged ({type(error).__name__}: {error}); the next run with run.tune=true rewrites it"


class Store:
    """The file: {"format", "made_with": {...}, "choices": {problem: {kernel: seconds}}}. Replaced as a whole."""

    def __init__(self, path: Path, made_with: Mapping[str, str]):
        self.path, self.made_with = path, dict(made_with)

    def read(self) -> dict[str, dict[str, float]]:
        """problem -> seconds of every kernel. Empty where there is no file or it was made with something else; a file that is
        no tuning file is warned about."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except OSError as error:
            warnings.warn(f"the tuning file {self.path} cannot be read ({error.strerror}); kernels are measured again",
                          stacklevel=2)
            return {}
        try:
            content = records.parse(text)
            if content["format"] != FORMAT or content["made_with"] != self.made_with:
                return {}
            return {problem: _checked(seconds) for problem, seconds in content["choices"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(f"the tuning file {self.path} is damaged ({type(error).__name__}: {error}); kernels are measured again "
                          f"and the file is rewritten", stacklevel=2)
            return {}

    def write(self, choices: Mapping[str, Mapping[str, float]]) -> None:
        content = {"format": FORMAT, "made_with": self.made_with, "choices": choices}
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, sort_keys=True)
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held by one process at a time; the system lets go of it when a process dies."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _checked(seconds) -> dict[str, float]:
    found = {str(name): float(value) for name, value in seconds.items()}
    if not found or not all(math.isfinite(value) and value > 0 for value in found.values()):
        raise ValueError(f"times {seconds} are not positive numbers")
    return found


class Tuner:
    """Answers plan.plan by measurement (plan.Tuner).

    measure(problem, plans) -> seconds of every plan's kernel. cannot() -> why nothing can be measured at this moment, or None.
    framework: whose targets this tuner measures. store None: nothing is kept on disk.
    """

    def __init__(self, measure: Measure, store: Store | None, framework: str, cannot: Callable[[], str | None] = lambda: None):
        self._measure, self.store, self.framework, self._cannot = measure, store, framework, cannot
        self._known: dict[str, dict[str, float]] | None = None
        self._closed: str | None = None

    def choose(self, problem, plans: tuple[Plan, ...]) -> Choice | None:
        if plans[0].target.framework != self.framework:
            return None
        key, names = f"{problem.op}: {problem!r}", [plan.kernel.name for plan in plans]
        seconds = self._lookup(key, names)
        if seconds is None and self._closed:
            return Choice(names[0], None, self._closed)
        if seconds is None and (reason := self._cannot()):
            return Choice(names[0], None, reason, provisional=True)
        if seconds is None:
            seconds = self._measure_once(key, names, problem, plans)
        return Choice(_fastest(seconds, names), seconds)

    def choices(self) -> dict[str, dict[str, float]]:
        """What has been measured or read: problem -> seconds of every kernel."""
        return {key: dict(seconds) for key, seconds in self._table().items()}

    def adopt(self, choices: Mapping[str, Mapping[str, float]], reason: str) -> None:
        """Take these choices in place of the own ones and measure nothing from now on, for `reason`. Forgets all plans."""
        from te_plugin.plan import forget_plans

        self._known, self._closed = {key: dict(seconds) for key, seconds in choices.items()}, reason
        forget_plans()

    def _table(self) -> dict[str, dict[str, float]]:
        if self._known is None:
            self._known = {} if self.store is None else self.store.read()
        return self._known

    def _lookup(self, key: str, names: list[str]) -> dict[str, float] | None:
        """A known answer, if it compares the kernels that are able now."""
        seconds = self._table().get(key)
        return seconds if seconds is not None and set(seconds) == set(names) else None

    def _measure_once(self, key: str, names: list[str], problem, plans) -> dict[str, float]:
        if self.store is None:
            return self._table().setdefault(key, _checked(self._measure(problem, plans)))
        try:
            with self.store.locked():
                self._known = {**self._table(), **self.store.read()}  # another process may have been first
                if (seconds := self._lookup(key, names)) is None:
                    seconds = self._known[key] = _checked(self._measure(problem, plans))
                    self.store.write(self._known)
                return seconds
        except OSError as error:
            warnings.warn(f"the tuning file {self.store.path} cannot be written ({error.strerror or error}); kernels are "
                          f"measured in every process, which may then choose differently", stacklevel=2)
            self.store = None
            return self._measure_once(key, names, problem, plans)


def _fastest(seconds: Mapping[str, float], order: list[str]) -> str:
    chosen = order[0]
    for name in order[1:]:
        if seconds[name] < seconds[chosen] * (1 - MARGIN):
            chosen = name
    return chosen
