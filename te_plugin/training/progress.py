"""What a run prints: a bar on a terminal, plain lines everywhere else (logs, pipes, CI). Printing never ends a run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque

_PLAIN_INTERVAL_S = 5.0


def say(text: str, stream=None) -> None:
    """Print a line. Where it cannot be printed the run goes on without: its directory holds everything."""
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:  # the reader is gone (| head): later lines, and the flush at the end of the process, go nowhere
        with contextlib.suppress(OSError):  # a stream of no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError:  # a log on a full disk: the line waits in the buffer for the next one
        pass


def format_duration(seconds: float) -> str:
    seconds = int(seconds + 0.5)
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Progress:
    """Shows step, loss, tokens/s and the time left. Only global rank 0 makes one that prints.

    total: the last step of the run; start: steps done before (resume). Tokens/s and ETA come from the last 20 steps, so one
    slow step (a checkpoint, an evaluation) does not mislead for long.
    """

    def __init__(self, total: int, start: int = 0, enabled: bool = True, stream=None):
        self.total, self.start, self.enabled = total, start, enabled
        self.stream = stream if stream is not None else sys.stdout
        self._recent: deque[tuple[float, float]] = deque(maxlen=20)  # (seconds, tokens) of a step
        self._last_plain = -1e9
        self._bar = self._make_bar() if enabled and self.stream.isatty() else None

    def _make_bar(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=Console(file=self.stream),
        )
        self._task = bar.add_task("train", total=self.total, completed=self.start, status="")
        bar.start()
        return bar

    def update(self, step: int, loss: float, tokens: int, seconds: float, val_loss: float | None = None) -> None:
        if not self.enabled:
            return
        self._recent.append((seconds, tokens))
        spent = sum(s for s, _ in self._recent) or 1e-9
        rate = sum(t for _, t in self._recent) / spent
        left = (self.total - step) * spent / len(self._recent)
        status = f"loss {loss:.4f}  {rate:,.0f} tokens/s  ETA {format_duration(left)}"
        if val_loss is not None:
            status += f"  val {val_loss:.4f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
            return
        now = time.monotonic()
        if step in (self.start + 1, self.total) or val_loss is not None or now - self._last_plain >= _PLAIN_INTERVAL_S:
            self._last_plain = now
            say(f"step {step}/{self.total}  {status}", self.stream)

    def message(self, text: str) -> None:
        """One line above the bar."""
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            say(text, self.stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
