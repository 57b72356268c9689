"""Small llamas and batches for the Megatron tests."""

from __future__ import annotations

import numpy as np
import torch

from te_plugin import megatron as plugin
from te_plugin.config import compose
from te_plugin.data.batch import Batch, to_bshd
from te_plugin.torch.batch import to_device

SMALL = ("model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=16",
         "model.ffn_hidden_size=128", "model.vocab_size=384", "data.seq_len=64", "schedule.tokens=1280",
         "schedule.warmup_tokens=0")


def small_config(*overrides: str, recipe: str = "llama_tiny"):
    """A composed configuration of a two-layer llama; FP32 unless an override says otherwise."""
    precision = () if any(o.startswith("precision=") for o in overrides) else ("precision=fp32",)
    return compose([f"recipe={recipe}", *SMALL, *precision, *overrides], for_run=False)


def packed_batch(lengths, seed: int = 0, gaps=None, capacity: int | None = None, vocab: int = 256) -> Batch:
    """One packed row of documents with random tokens; `gaps`: padding rows after each document."""
    rng = np.random.default_rng(seed)
    gaps = [0] * len(lengths) if gaps is None else gaps
    capacity = len(lengths) if capacity is None else capacity
    total = sum(lengths) + sum(gaps)
    tokens, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
    labels = np.full(total, -100, np.int32)
    starts, at = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        document = rng.integers(0, vocab, length).astype(np.int32)
        tokens[at:at + length], positions[at:at + length] = document, np.arange(length)
        labels[at:at + length - 1] = document[1:]
        starts.append(at)
        at += length + gap
    spare = capacity - len(lengths)
    cu = np.concatenate([[0], np.cumsum(lengths), [sum(lengths)] * spare]).astype(np.int32)
    padded = np.asarray([*starts, *[total] * (spare + 1)], np.int32)
    ids = np.asarray([*range(len(lengths)), *[-1] * spare], np.int64)
    return Batch(tokens, labels, positions, cu, padded, ids, rows=1)


def padded_batch(packed: Batch, width: int):
    return to_bshd(packed, width)


def build(*overrides: str, **kwargs):
    cfg = small_config(*overrides, **kwargs)
    plugin.initialize(cfg)
    return plugin.build_gpt(cfg)


def mean_loss(model, batch) -> torch.Tensor:
    """Token-weighted mean loss of a NumPy batch."""
    sent = to_device(batch, "cpu")
    return plugin.gpt_token_losses(model, sent).sum() / sent.loss_tokens
