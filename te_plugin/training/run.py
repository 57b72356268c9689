"""train(cfg, run_dir): one run from its configuration to its verdict. Every rank of a job calls it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from te_plugin.config import Config, recipe_hash
from te_plugin.convergence.check import RunFacts, judge
from te_plugin.convergence.golden import Arm, Golden, golden_path
from te_plugin.convergence.verdict import VERDICT_FILE, Verdict
from te_plugin.importing import is_weights_folder
from te_plugin.training import checkpoint as ckpt
from te_plugin.training import distributed
from te_plugin.training.adapter import Adapter
from te_plugin.training.environment import describe, write_json
from te_plugin.training.kernel_choice import measured_kernels
from te_plugin.training.loop import Loop
from te_plugin.training.metrics import METRICS_FILE, read_metrics
from te_plugin.training.progress import say
from te_plugin.training.run_dir import RunDirError, held, writing
from te_plugin.training.step import Schedule, TrainingError
from te_plugin.training.tracking import Tracker


def train(cfg: Config, run_dir: Path | str, adapter: Adapter | None = None) -> Verdict:
    """Train, check the curve, write the run directory; prints `verdict: ...` as its last line on rank 0.

    ConfigError, DataError and RunDirError are raised before any step; what goes wrong later becomes a FAIL verdict.
    """
    run_dir = Path(run_dir)
    # MaxText's devices are JAX's: torch then only counts and keeps house on the CPU.
    world = distributed.start("cpu" if cfg.adapter.name == "maxtext" else cfg.run.device)
    try:
        _set_up_process(cfg, world)
        with _sabotaged(cfg, world) as cfg:
            adapter = adapter or _adapter_of(cfg)
            world = adapter.initialize(cfg, world)
            with held(cfg, run_dir, world), measured_kernels(cfg, world):
                run = _Run(cfg, run_dir, adapter, world, cfg.run.resume)
                verdict = run.execute()
                if cfg.check.mode == "record" and verdict.status == "PASS":
                    verdict = _record(run)
        if world.is_main:
            say(verdict.line)
        return verdict
    finally:
        if world.owns_process_group:
            if adapter is not None:
                adapter.finalize()
            distributed.stop(world)


class _Run:
    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        adapter: Adapter,
        world: distributed.World,
        resume: bool,
    ):
        self.cfg, self.run_dir, self.adapter, self.world, self.resume = cfg, run_dir, adapter, world, resume
        self.schedule = Schedule.of(cfg)

    def execute(self) -> Verdict:
        cfg, world = self.cfg, self.world
        golden = (
            Golden.load(golden_path(cfg.recipe))
            if cfg.check.mode == "golden" and golden_path(cfg.recipe).exists()
            else None
        )
        self.adapter.reset_launches()
        data = self.adapter.build_data(cfg)
        self.engine = engine = self.adapter.make_engine(cfg, self.run_dir, self.adapter, world, data)
        self.resume_from = engine.latest() if self.resume else None
        self.facts = facts = RunFacts(
            recipe_hash=recipe_hash(cfg),
            order_hash=data.order_hash(min(data.rows_per_epoch, 4096)),
            init_hash=engine.init_hash(),
            vocab_size=cfg.model.vocab_size,
            planned_steps=self.schedule.total_steps,
            context_free_entropy=_entropy_of(cfg, data) if world.is_main else None,
            token_hash=data.token_hash(),
        )
        self._require_same_rows()
        self._tell_of_held_out_rows(data.val_rows)
        with writing(self.run_dir):
            if world.is_main:
                (self.run_dir / VERDICT_FILE).unlink(missing_ok=True)  # from here on it is no longer that of the run
            tracker = self._make_tracker()
            if world.is_main:
                self._write_environment(data, facts)
        fits = golden is not None and golden.recipe_hash == facts.recipe_hash
        matching = golden.arm_for(cfg.precision.name, cfg.adapter.name) if fits else None
        golden_loss = matching.loss_at if matching else lambda step: None
        loop = Loop(cfg, engine, world, tracker, golden_loss, self._data_hashes)
        verdict, last_step = None, 0
        try:
            outcome = self._start_and_run(loop, tracker)
            last_step = outcome.last_step
            if outcome.interrupted:
                verdict = Verdict(
                    "INCONCLUSIVE",
                    f"interrupted after step {outcome.last_step} of {self.schedule.last_step}; "
                    f"continue with run.resume=true run.dir={self.run_dir}",
                )
        except (TrainingError, ckpt.CheckpointError) as error:  # every rank raises these
            verdict = Verdict("FAIL", str(error), {"error": type(error).__name__})
        except BaseException as error:
            if world.size == 1 and isinstance(error, OSError):  # for example a full disk under metrics.jsonl
                verdict = Verdict("FAIL", f"the run directory {self.run_dir} cannot be written: {error}")
            else:
                self._save_crash(error)
                tracker.finish(1)
                raise
        if world.is_main:
            verdict = self._conclude(verdict, facts, golden, matching, last_step)
        verdict = world.broadcast_object(verdict)
        tracker.finish(verdict.exit_code)
        return verdict

    def _require_same_rows(self) -> None:
        """RunDirError when the rows of a step are not the resumed run's: some would be skipped, others repeated."""
        if self.resume_from is None:
            return
        info, step, rows = self.resume_from.info, self.resume_from.step, self.cfg.schedule.global_rows
        next_row = info.get("next_row", step * rows)
        if next_row != step * rows:
            raise RunDirError(
                f"{self.resume_from.path} stands at row {next_row} after {step} steps, and schedule.global_rows={rows} makes "
                f"them {step * rows}: a resumed run keeps its rows a step; set it back, or start a new run with run.init_from"
            )
        for name, mine in self._data_hashes.items():
            if info.get(name, mine) != mine:
                raise RunDirError(
                    f"the training rows are not those of {self.resume_from.path} ({name} {mine}, it has {info[name]}): "
                    f"documents were added, removed or changed at data.path={self.cfg.data.path}, or the tokenizer or a setting "
                    f"of the data was. Restore them, or start a new run with run.init_from"
                )

    def _tell_of_held_out_rows(self, there: int) -> None:
        asked = self.cfg.schedule.eval_rows
        if self.world.is_main and self.cfg.schedule.eval_interval and asked > there:
            what = f"is over all {there} rows there are" if there else "is not computed: there are no rows for it"
            say(f"the held-out loss {what}; schedule.eval_rows={asked} asks for more, data.val_fraction makes more")

    @property
    def _data_hashes(self) -> dict[str, str]:
        """From where the rows take their tokens, and what these are: kept in every checkpoint."""
        return {"order_hash": self.facts.order_hash, "token_hash": self.facts.token_hash}

    def _conclude(
        self, verdict: Verdict | None, facts: RunFacts, golden: Golden | None, matching: Arm | None, last_step: int
    ) -> Verdict:
        """Rank 0: what really ran, the verdict and the picture. A full disk must not hide how the run ended."""
        verdict = verdict or judge(self.cfg, self.run_dir, facts, golden, last_step)
        try:
            write_json(self.run_dir / "kernels.json", self.adapter.launches())
            verdict.save(self.run_dir)
            self._draw(matching)
        except OSError as error:
            if verdict.status != "FAIL":  # else the reason is a better one, often the same disk
                said = verdict.line.removeprefix("verdict: ")
                verdict = Verdict("FAIL", f"{said}, but the run directory could not be completed: {error}", verdict.details)
            with contextlib.suppress(OSError):
                verdict.save(self.run_dir)
        return verdict

    def _save_crash(self, error: BaseException) -> None:
        if self.world.is_main:
            reason = traceback.format_exception_only(error)[-1].strip()
            with contextlib.suppress(OSError):  # the exception itself is raised next
                Verdict("FAIL", f"crashed: {reason}").save(self.run_dir)

    def _start_and_run(self, loop: Loop, tracker: Tracker):
        start = 0
        if self.resume_from is not None:
            loop.restore(self.resume_from)
            start = self.resume_from.step
            if float(self.resume_from.info.get("loss", 0.0)) < math.log(self.cfg.model.vocab_size):
                loop.require_active_weights(f"checkpoint {self.resume_from.path}")
        elif self.cfg.run.init_from is not None:
            if not is_weights_folder(self.cfg.run.init_from):  # imported weights are in the model since it was built
                self.engine.init_from(ckpt.find(self.cfg.run.init_from))
            loop.require_active_weights(f"run.init_from={self.cfg.run.init_from}")
        tracker.resume(start + 1)
        tracker.config(asdict(self.cfg))
        if start and self.world.is_main:
            say(f"resumed from {self.resume_from.path}: step {start} is done")
        return loop.run(start)

    def _make_tracker(self) -> Tracker:
        cfg, track = self.cfg, self.cfg.track
        tags = [cfg.precision.name, cfg.layout.name, cfg.parallel.name, cfg.model.name, cfg.adapter.name]
        if cfg.testing.sabotage != "none":
            tags.append(f"sabotage-{cfg.testing.sabotage}")
        return Tracker(
            self.run_dir,
            track.mode,
            project=track.project,
            entity=track.entity,
            name=track.run_name or self.run_dir.name,
            group=track.group or cfg.recipe,
            job_type="train",
            tags=tags,
            rank=self.world.rank,
            run_id=self.resume_from.info.get("run_id") if self.resume_from else None,
        )

    def _write_environment(self, data, facts: RunFacts) -> None:
        environment = describe(self.world.device, self.world.size)
        environment.update(self.engine.describe())
        environment["data"] = data.report()
        environment.update(
            recipe=self.cfg.recipe,
            recipe_hash=facts.recipe_hash,
            **self._data_hashes,
            init_hash=facts.init_hash,
            sabotage=self.cfg.testing.sabotage,
        )
        write_json(self.run_dir / "env.json", environment)

    def _draw(self, golden: Arm | None) -> None:
        rows = read_metrics(self.run_dir) if (self.run_dir / METRICS_FILE).exists() else []
        if rows:
            from te_plugin.convergence.pictures import draw_run

            draw_run(
                rows,
                self.run_dir / "curve.png",
                title=f"{self.cfg.recipe}: {self.cfg.precision.name}, {self.cfg.layout.name}",
                golden=golden,
            )


def _record(run: _Run) -> Verdict:
    """The twins of a run that is to become the golden curve."""
    from te_plugin.training.record import record

    world = run.world

    def run_twin(cfg: Config, folder: Path) -> Verdict:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        with held(cfg, folder, world):
            return _Run(cfg, folder, run.adapter, world, False).execute()

    verdict = record(run.cfg, run.run_dir, run.facts, world, run_twin)
    verdict = world.broadcast_object(verdict)
    if world.is_main:
        verdict.save(run.run_dir)
        if verdict.status == "PASS":
            run._draw(Golden.load(golden_path(run.cfg.recipe)).arm_for(run.cfg.precision.name))
    return verdict


def _adapter_of(cfg: Config) -> Adapter:
    if cfg.adapter.name == "megatron":
        from te_plugin.training.megatron_adapter import megatron_adapter

        return megatron_adapter()
    from te_plugin.training.maxtext_adapter import maxtext_adapter

    return maxtext_adapter()


def _set_up_process(cfg: Config, world: distributed.World) -> None:
    """Threads and determinism: the same run gives the same bits."""
    from te_plugin import ffi

    if cfg.run.threads is not None:
        torch.set_num_threads(cfg.run.threads)
        if ffi.is_built("cpu"):
            ffi.function("cpu", "set_num_threads")(cfg.run.threads)
    if world.device.type == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(cfg.run.seed)


@contextlib.contextmanager
def _sabotaged(cfg: Config, world: distributed.World) -> Iterator[Config]:
    """Deliberate damage for tests of the checks. Loud, recorded in env.json and in the run's tags, and over when the run is."""
    name = cfg.testing.sabotage
    if name != "none" and world.is_main:
        say(f"*** testing.sabotage={name}: this run is damaged on purpose; its verdict should not be PASS ***")
    if name in ("none", "no_document_mask"):  # the latter damages the rows of each batch, see step.Batches
        yield cfg
        return
    from te_plugin.testing import sabotage

    kernel = sabotage.install()
    try:
        yield replace(cfg, attention=replace(cfg.attention, kernel=kernel), run=replace(cfg.run, fallback="allow"))
    finally:
        sabotage.remove()


def _entropy_of(cfg: Config, data) -> float | None:
    """Entropy of the training labels' frequencies, in nats: the best loss without context. None for synthetic data."""
    if cfg.data.source == "synthetic":
        return None
    import numpy as np

    rows = min(data.rows_per_epoch, 512)
    labels = np.concatenate([data.train_batch(r, 1).labels for r in range(rows)])
    counts = np.bincount(labels[labels >= 0])
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())
