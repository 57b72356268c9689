"""A progress line for work whose length is not known beforehand; it appears only when the work takes longer than a
moment."""

from __future__ import annotations

import time

_PATIENCE = 2.0  # seconds


class Progress:
    """Context manager; call it with (documents, tokens) done since the last call."""

    def __init__(self, title: str):
        self._title, self._bar, self._documents, self._tokens = title, None, 0, 0

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        return self

    def __call__(self, documents: int, tokens: int) -> None:
        self._documents += documents
        self._tokens += tokens
        if self._bar is None:
            if time.monotonic() - self._start < _PATIENCE:
                return
            self._bar, self._task = self._open()
        rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
        text = f"{self._documents:,} documents, {self._tokens:,} tokens, {rate:,.0f} tokens/s"
        self._bar.update(self._task, status=text)

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _open(self):
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}: {task.fields[status]}"), TimeElapsedColumn())
        bar = Bar(*columns, console=Console(stderr=True), transient=True)
        bar.start()
        return bar, bar.add_task(self._title, total=None, status="")
