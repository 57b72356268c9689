"""The training loop: steps, evaluations, checkpoints, rows, and a clean stop on a signal.

Step numbers count optimizer updates: row k and checkpoint k hold the state after k updates, and a run that resumes from
checkpoint k continues with step k + 1 on the rows that follow. Row contents depend only on (config, step), so the rows of a
resumed run equal those of an unbroken one bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from te_plugin.config import Config
from te_plugin.training.checkpoint import Checkpoint
from te_plugin.training.distributed import World
from te_plugin.training.engine import Engine
from te_plugin.training.performance import flops_per_token
from te_plugin.training.progress import Progress
from te_plugin.training.step import Schedule, StepResult, TrainingError
from te_plugin.training.tracking import Tracker


@dataclass(frozen=True)
class Outcome:
    """How the loop ended. interrupted: by a signal, after a checkpoint of last_step."""

    last_step: int
    interrupted: bool


class StopSignal:
    """Turns SIGTERM and SIGINT into a wish that the loop reads between steps; a second signal kills as usual."""

    def __init__(self):
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    @contextlib.contextmanager
    def listening(self):
        old = {}

        def handler(number, frame):
            self.name = signal.Signals(number).name
            for n, previous in old.items():
                signal.signal(n, previous)

        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                old[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread: the embedding program owns the signals
            old.clear()
        try:
            yield self
        finally:
            for number, previous in old.items():
                signal.signal(number, previous)


class Loop:
    """Everything one run needs, from the first step to the last checkpoint."""

    def __init__(
        self,
        cfg: Config,
        engine: Engine,
        world: World,
        tracker: Tracker,
        golden_loss: Callable[[int], float | None],
        data_hashes: Mapping[str, str],
    ):
        self.cfg, self.engine, self.world, self.data_hashes = cfg, engine, world, data_hashes
        self.tracker, self.golden_loss = tracker, golden_loss
        self.schedule = Schedule.of(cfg)
        self._flops_per_token = flops_per_token(cfg)
        self._last_loss = math.nan

    def run(self, start_step: int) -> Outcome:
        """Steps start_step + 1 .. last. TrainingError when the loss or gradient is not finite; its row is written first."""
        last = self.schedule.last_step
        progress = Progress(last, start_step, enabled=self.world.is_main)
        step, stop = start_step, StopSignal()
        self.engine.start()
        try:
            with stop.listening():
                while step < last:
                    step += 1
                    result = self.engine.step(step, bool(stop))
                    interrupted = result.stop_requested and step < last
                    val_loss = self._evaluate(step, last) if math.isfinite(result.loss) else None
                    self._record(step, result, val_loss)
                    self._require_finite(step, result)
                    progress.update(step, result.loss, self.schedule.step_tokens, result.seconds, val_loss)
                    if interrupted or step == last or step % self.cfg.schedule.checkpoint_interval == 0:
                        self.save(step)
                    if interrupted:
                        progress.message(f"{stop.name or 'a signal'}: stopped after step {step}, checkpoint written")
                        return Outcome(step, True)
        finally:
            progress.close()
        return Outcome(step, False)

    def save(self, step: int) -> None:
        """Write checkpoint `step`, with what resuming needs to know."""
        self.tracker.sync_to_disk()
        info = {
            "tokens": step * self.schedule.step_tokens,
            "loss": self._last_loss,
            "run_id": self.world.broadcast_object(self.tracker.run_id),
            "recipe": self.cfg.recipe,
            "adapter": self.cfg.adapter.name,
            "precision": self.cfg.precision.name,
            "parallel": self.cfg.parallel.name,
            "next_row": step * self.cfg.schedule.global_rows,
            **self.data_hashes,
            "kind": "training",
        }
        self.engine.save(step, info)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a training checkpoint."""
        self.engine.restore(checkpoint)
        self._last_loss = float(checkpoint.info.get("loss", math.nan))

    def require_active_weights(self, what: str) -> None:
        """Loaded weights must beat a uniform guess on held-out rows: otherwise they were loaded but are not used."""
        if not self._holds_out_rows:
            return
        loss, uniform = self.engine.evaluate(), math.log(self.cfg.model.vocab_size)
        if not loss < uniform:
            raise TrainingError(
                f"{what} was loaded, but the loss before the first step is {loss:.4f}, not below ln(vocabulary) = {uniform:.4f}: "
                f"the weights are not active, or belong to another model or tokenizer"
            )

    @property
    def _holds_out_rows(self) -> bool:
        return self.cfg.data.val_fraction > 0

    def _evaluate(self, step: int, last: int) -> float | None:
        if not self._holds_out_rows or (step % self.cfg.schedule.eval_interval and step != last):
            return None
        return self.engine.evaluate()

    def _record(self, step: int, result: StepResult, val_loss: float | None) -> None:
        self._last_loss = result.loss
        row: dict[str, Any] = {
            "step": step,
            "train/tokens": step * self.schedule.step_tokens,
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            "train/label_tokens": result.label_tokens,
            "pack/fill_frac": result.fill,
            "pack/docs_per_row": result.documents_per_row,
            "fp8/nonfinite": result.nonfinite,
        }
        if val_loss is not None:
            row["val/loss"] = val_loss
        golden = self.golden_loss(step)
        if golden is not None:
            row["gap/loss"] = result.loss - golden
        row.update(self._performance(result))
        self.tracker.log(row)

    def _performance(self, result: StepResult) -> dict[str, float]:
        rate = self.schedule.step_tokens / result.seconds / self.engine.devices
        return {
            "perf/step_s": result.seconds,
            "perf/tokens_per_s_per_gpu": rate,
            "perf/tflops_per_gpu": rate * self._flops_per_token / 1e12,
            "perf/data_wait_frac": result.data_seconds / result.seconds,
            **self.engine.hardware_row(rate * self._flops_per_token),
        }

    def _require_finite(self, step: int, result: StepResult) -> None:
        for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
            if not math.isfinite(value):
                raise TrainingError(
                    f"the {name} of step {step} is {value}; no weight was changed by it. FP8 quantisation saw {result.nonfinite} "
                    f"non-finite values in this step. Look at train/grad_norm before step {step}, try precision=bf16"
                )
