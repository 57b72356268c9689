"""The loop's engine for MaxText: steps and evaluations of te_plugin.maxtext.model on the loop's data, Orbax checkpoints."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from te_plugin.config import Config, ConfigError
from te_plugin.maxtext.model import TrainedModel
from te_plugin.maxtext.settings import data_parallel
from te_plugin.training import orbax_checkpoint
from te_plugin.training.checkpoint import Checkpoint
from te_plugin.training.optimizer import learning_rate
from te_plugin.training.performance import peak_bf16_flops
from te_plugin.training.step import (
    Schedule,
    StepResult,
    TrainingError,
    documents_per_row,
    fill_fraction,
    label_count,
    without_document_mask,
)
from te_plugin.weights import initial_value, llama_weights


class MaxTextEngine:
    """See engine.Engine. One process; `devices` are all that parallel=ddp or fsdp2 may use, or the first for parallel=single."""

    def __init__(self, cfg: Config, run_dir: Path, data):
        self.cfg, self.run_dir, self.data = cfg, run_dir, data
        self.schedule = Schedule.of(cfg)
        found = jax.devices()[:1] if cfg.parallel.name == "single" else jax.devices()
        self._rows = cfg.schedule.micro_rows * data_parallel(cfg, len(found))
        if cfg.schedule.global_rows % self._rows:
            raise ConfigError(
                f"schedule.global_rows={cfg.schedule.global_rows} is not a multiple of micro_rows="
                f"{cfg.schedule.micro_rows} * {data_parallel(cfg, len(found))} devices with rows of their "
                "own: every device "
                f"takes as many microbatches; change one of them"
            )
        rates = jnp.asarray([self._rate(step) for step in range(1, self.schedule.total_steps + 1)], jnp.float32)
        self.model = TrainedModel(cfg, lambda done: rates[done], found)
        self.model.initialise()

    @property
    def devices(self) -> int:
        return len(self.model.devices)

    def describe(self) -> dict[str, Any]:
        devices = self.model.devices
        return {
            "device": devices[0].platform,
            "jax_devices": [device.device_kind for device in devices],
            "mesh": {name: size for name, size in self.model.mesh.shape.items() if size > 1},
        }

    def init_hash(self) -> str:
        """As training.optimizer.fingerprint, over the weights this run starts from, in Megatron's grouping."""
        known = llama_weights(self.cfg.model, self.cfg.moe.num_experts, self.cfg.moe.ffn_hidden_size)
        return fingerprint_of_common(
            {name: initial_value(weight, self.cfg.run.seed) for name, weight in known.items()}, self.cfg
        )

    def start(self) -> None:
        """Nothing is left to do: XLA compiles at the first step."""

    def step(self, step: int, stop_requested: bool) -> StepResult:
        start = time.perf_counter()
        host = self._microbatches(step)
        data_seconds = time.perf_counter() - start
        tokens = sum(label_count(batch) for batch in host)
        if tokens == 0:
            raise TrainingError(f"step {step} has no label token in any row: check the documents and their loss masks")
        numbers = self.model.step(self.model.batch([self._damaged(batch) for batch in host]))
        loss, norm, nonfinite = (float(numbers[name]) for name in ("loss", "grad_norm", "nonfinite"))
        return StepResult(
            loss,
            norm,
            self._rate(step),
            tokens,
            stop_requested,
            time.perf_counter() - start,
            data_seconds,
            fill_fraction(host),
            documents_per_row(host),
            int(nonfinite),
        )

    def evaluate(self) -> float:
        """Mean loss over the held-out rows, in BF16 for FP8 runs. The last batch is filled up with rows that do not count."""
        total_rows = min(self.cfg.schedule.eval_rows, self.data.val_rows)
        loss = tokens = 0.0
        for first in range(0, total_rows, self._rows):
            rows = min(self._rows, total_rows - first)
            batch = self.data.val_batch(first, rows) if rows == self._rows else self._filled(first, rows)
            loss_sum, count = self.model.loss_sum(self._damaged(batch))
            loss, tokens = loss + float(loss_sum), tokens + float(count)
        return loss / tokens if tokens else math.nan

    def save(self, step: int, info: dict[str, Any]) -> None:
        orbax_checkpoint.save(
            self.run_dir, step, self.model.checkpoint_tree(), info, self.cfg.schedule.keep_checkpoints
        )

    def latest(self) -> Checkpoint | None:
        return orbax_checkpoint.latest(self.run_dir)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this or another mesh."""
        self.model.load_checkpoint_tree(orbax_checkpoint.load(checkpoint, self.model.checkpoint_tree()))
        if self.model.updates_done != checkpoint.step:
            raise TrainingError(
                f"{checkpoint.path} is the checkpoint of step {checkpoint.step}, but its optimizer has done "
                f"{self.model.updates_done} updates: the folder was changed by hand"
            )

    def init_from(self, checkpoint: Checkpoint) -> None:
        raise ConfigError("run.init_from with adapter=maxtext is not supported; use adapter=megatron")

    def hardware_row(self, flops_rate: float) -> dict[str, float]:
        if self.model.devices[0].platform == "cpu":
            return {}
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self.model.devices]
        row = {"mem/peak_alloc_gib": max(peaks) / 2**30}
        peak = peak_bf16_flops(self.model.devices[0].device_kind)
        return row if peak is None else row | {"perf/mfu_bf16_peak": flops_rate / peak}

    def _microbatches(self, step: int) -> list:
        """The rows of a step, in the order in which every adapter takes them, cut into microbatches over all devices."""
        first = (step - 1) * self.cfg.schedule.global_rows
        offsets = range(0, self.cfg.schedule.global_rows, self._rows)
        return [self.data.train_batch(first + offset, self._rows) for offset in offsets]

    def _filled(self, first: int, rows: int):
        """The last validation rows, padded with copies whose labels do not count: the shape is compiled once."""
        batches = [self.data.val_batch(first, rows)] + [self.data.val_batch(first, 1)] * (self._rows - rows)
        return join_rows(batches, real=1)

    def _damaged(self, batch):
        return without_document_mask(batch) if self.cfg.testing.sabotage == "no_document_mask" else batch

    def _rate(self, step: int) -> float:
        return learning_rate(
            step * self.schedule.step_tokens,
            peak=self.cfg.optim.lr,
            total_tokens=self.schedule.total_steps * self.schedule.step_tokens,
            warmup_tokens=self.cfg.schedule.warmup_tokens,
            min_ratio=self.cfg.schedule.min_lr_ratio,
        )


def join_rows(batches: list, real: int):
    """One Batch of several; those after the first `real` have no labels."""
    from te_plugin.data.batch import Batch

    starts, lengths, offset, count = [], [], 0, 0
    for batch in batches:
        starts.append(batch.cu_seqlens_padded[:-1] + offset)
        lengths.append(np.diff(batch.cu_seqlens))
        offset += len(batch.tokens)
        count += batch.rows
    labels = [batch.labels if i < real else np.full_like(batch.labels, -100) for i, batch in enumerate(batches)]
    return Batch(
        tokens=np.concatenate([b.tokens for b in batches]),
        labels=np.concatenate(labels),
        positions=np.concatenate([b.positions for b in batches]),
        cu_seqlens=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32),
        cu_seqlens_padded=np.concatenate([*starts, [offset]]).astype(np.int32),
        doc_ids=np.concatenate([b.doc_ids for b in batches]),
        rows=count,
    )


def fingerprint_of_common(weights: dict[str, np.ndarray], cfg: Config) -> str:
    """training.optimizer.fingerprint of a Megatron model with these weights, computed from weights by common name.

    The sums do not depend on the order of a tensor's elements, so a fused tensor's are the sums of its parts'.
    """
    sums: dict[str, list[int]] = {}
    for name, value in weights.items():
        bits = np.ascontiguousarray(value).astype(ml_dtypes.bfloat16).view(np.int16).astype(np.int64)
        total = sums.setdefault(megatron_name(name), [0, 0])
        total[0] += int(bits.sum())
        total[1] += int((bits * (bits >> 4)).sum())
    text = ";".join(f"{name}:{sums[name][0]}:{sums[name][1]}" for name in megatron_order(cfg))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def megatron_name(name: str) -> str:
    """The Megatron parameter that holds a weight; see megatron/weights.py. Kept here because it is needed without Megatron."""
    plain = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }
    if name in plain:
        return plain[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    inner = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "self_attn.o_proj": "self_attention.linear_proj",
        "mlp.down_proj": "mlp.linear_fc2",
        "mlp.gate_proj": "mlp.linear_fc1",
        "mlp.up_proj": "mlp.linear_fc1",
        "block_sparse_moe.gate": "mlp.router",
    }.get(part)
    if inner is None and part.startswith("self_attn."):
        inner = "self_attention.linear_qkv"
    elif inner is None:
        inner = "mlp.experts.linear_fc" + ("2" if part.endswith(".w2") else "1")
    return f"decoder.layers.{layer}.{inner}.weight"


def megatron_order(cfg: Config) -> list[str]:
    """Megatron's parameters in the order of its model."""
    if cfg.moe.num_experts:
        mlp = ("mlp.router", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
    else:
        mlp = ("mlp.linear_fc1", "mlp.linear_fc2")
    parts = ("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "pre_mlp_layernorm", *mlp)
    names = ["embedding.word_embeddings.weight"]
    names += [f"decoder.layers.{layer}.{part}.weight" for layer in range(cfg.model.num_layers) for part in parts]
    names.append("decoder.final_layernorm.weight")
    return names if cfg.model.tie_embeddings else [*names, "output_layer.weight"]
