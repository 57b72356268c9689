"""One optimizer step: microbatches in, one row of numbers out.

Loss is the mean over all label tokens of the step, whatever rank or microbatch they are in: the token count is summed over
ranks first, and each microbatch's loss sum is divided by it. A rank or microbatch without a label token adds exactly zero.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from te_plugin.config import Config, ConfigError
from te_plugin.training.adapter import Adapter
from te_plugin.training.distributed import World, check_rows
from te_plugin.training.optimizer import MasterAdamW, learning_rate


class TrainingError(RuntimeError):
    """Training cannot go on: the loss or gradient is not finite, or loaded weights are not what they should be."""


@dataclass(frozen=True)
class Schedule:
    """Steps and learning rates, derived from the tokens of the recipe."""

    step_tokens: int
    total_steps: int
    last_step: int

    @classmethod
    def of(cls, cfg: Config) -> Schedule:
        step_tokens = cfg.schedule.global_rows * cfg.data.seq_len
        total = cfg.schedule.tokens // step_tokens
        if total < 1:
            raise ConfigError(
                f"schedule.tokens={cfg.schedule.tokens} is less than one step of {step_tokens} tokens; raise it"
            )
        stop = cfg.schedule.stop_after_steps
        return cls(step_tokens, total, total if stop is None else min(stop, total))


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, equal on every rank. seconds: wall time; data_seconds: spent waiting for data."""

    loss: float
    grad_norm: float
    lr: float
    label_tokens: int
    stop_requested: bool
    seconds: float
    data_seconds: float
    fill: float
    documents_per_row: float
    nonfinite: int


class Batches:
    """Rows of a step or an evaluation, shaped for the layout and damaged on request (testing.sabotage)."""

    def __init__(self, cfg: Config, data, adapter: Adapter, world: World):
        self.cfg, self.data, self.adapter, self.world = cfg, data, adapter, world
        self.microbatches = check_rows(cfg.schedule.global_rows, cfg.schedule.micro_rows, world.dp_size)

    def step(self, step: int) -> list:
        """This rank's microbatches of step `step` (1 is the first). The global rows of a step depend on nothing but the step."""
        rows, mine = self.cfg.schedule.micro_rows, self.cfg.schedule.global_rows // self.world.dp_size
        first = (step - 1) * self.cfg.schedule.global_rows + self.world.dp_rank * mine
        return [self.data.train_batch(first + i * rows, rows) for i in range(self.microbatches)]

    def to_device(self, batch):
        if self.cfg.testing.sabotage == "no_document_mask":
            batch = without_document_mask(batch)
        if self.cfg.layout.name == "bshd":
            from te_plugin.data import to_bshd

            batch = to_bshd(batch, self.cfg.data.seq_len)
        return self.adapter.to_device(batch, self.world.device)


def without_document_mask(batch):
    """Deliberate damage: every row is one segment, so tokens see the documents before theirs. Positions stay as they were."""
    row_len = len(batch.tokens) // batch.rows
    edges = np.full_like(batch.cu_seqlens, len(batch.tokens))
    edges[: batch.rows + 1] = np.arange(batch.rows + 1, dtype=edges.dtype) * row_len
    return replace(batch, cu_seqlens=edges, cu_seqlens_padded=edges.copy())


def label_count(batch) -> int:
    return int((batch.labels >= 0).sum())


def fill_fraction(batches: list) -> float:
    return float(sum(int(b.cu_seqlens[-1]) for b in batches) / sum(len(b.tokens) for b in batches))


def documents_per_row(batches: list) -> float:
    return float(sum(int((b.doc_ids >= 0).sum()) for b in batches) / sum(b.rows for b in batches))


class Stepper:
    """Runs optimizer steps and evaluations on a built model."""

    def __init__(
        self,
        cfg: Config,
        adapter: Adapter,
        world: World,
        model: torch.nn.Module,
        optimizer: MasterAdamW,
        data,
        schedule: Schedule,
    ):
        self.cfg, self.adapter, self.world, self.schedule = cfg, adapter, world, schedule
        self.model, self.optimizer, self.data = model, optimizer, data
        self.batches = Batches(cfg, data, adapter, world)

    def run(self, step: int, stop_requested: bool = False) -> StepResult:
        """Step `step`. TrainingError before any weight changes when the loss or the gradient norm is not finite."""
        start = time.perf_counter()
        host = self.batches.step(step)
        data_seconds = time.perf_counter() - start
        tokens = int(self.world.sum_dp(torch.tensor([sum(label_count(b) for b in host)], device=self.world.device)))
        if tokens == 0:
            raise TrainingError(f"step {step} has no label token in any row: check the documents and their loss masks")
        self.optimizer.zero_grad()
        self.model.train()
        self.adapter.begin_step(self.model)
        sums = torch.zeros(3, dtype=torch.float64, device=self.world.device)  # loss, non-finite values, stop
        for batch in host:
            losses = self.adapter.token_losses(self.model, self.batches.to_device(batch))
            (losses.sum() * (1.0 / tokens)).backward()
            sums[0] += losses.detach().double().sum()
            bad = self.adapter.nonfinite(self.model)
            if bad is not None:
                sums[1] += bad
        sums[2] = float(stop_requested)
        self.optimizer.reduce_gradients()
        loss_sum, nonfinite, stop = (self.world.sum_all(sums) / self.world.tp_size).tolist()
        loss, norm = loss_sum / tokens, self.optimizer.gradient_norm()
        lr = self._learning_rate(step)
        result = StepResult(
            loss,
            norm,
            lr,
            tokens,
            stop > 0,
            0.0,
            data_seconds,
            fill_fraction(host),
            documents_per_row(host),
            int(nonfinite),
        )
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizer.step(lr, norm)
            self.adapter.end_step(self.model, self.world)
        return replace(result, seconds=time.perf_counter() - start)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out rows, in BF16 for FP8 runs, so that every arm is measured by the same ruler."""
        rows = self.cfg.schedule.micro_rows
        total_rows = min(self.cfg.schedule.eval_rows, self.data.val_rows)
        chunks = math.ceil(total_rows / rows)
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        self.model.eval()
        with self.adapter.evaluation(self.model):
            for turn in range(math.ceil(chunks / self.world.dp_size)):
                chunk = turn * self.world.dp_size + self.world.dp_rank
                first = (chunk if chunk < chunks else 0) * rows
                batch = self.data.val_batch(first, min(rows, total_rows - first))
                losses = self.adapter.token_losses(self.model, self.batches.to_device(batch))
                if chunk < chunks:  # ranks beyond the last chunk only keep the others company in collectives
                    sums[0] += losses.double().sum()
                    sums[1] += label_count(batch)
        self.model.train()
        loss_sum, tokens = self.world.sum_dp(sums).tolist()
        return loss_sum / tokens if tokens else math.nan

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step * self.schedule.step_tokens,
            peak=self.cfg.optim.lr,
            total_tokens=self.schedule.total_steps * self.schedule.step_tokens,
            warmup_tokens=self.cfg.schedule.warmup_tokens,
            min_ratio=self.cfg.schedule.min_lr_ratio,
        )
