"""What makes two runs comparable: the recipe hash, and the difference of two configurations."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from te_plugin.config.schema import Config

# Fields that change the expected curve. Left out on purpose: what may only change speed or memory (precision, layout,
# attention, parallel, adapter, grouped GEMM), where the run lies and how it is watched, and optim.lr: a run with another
# learning rate is still compared with the golden curve of its recipe, and fails.
_SECTIONS = ("model", "moe", "data", "optim", "schedule")
_LEFT_OUT = {"moe.grouped_gemm", "optim.lr", "schedule.stop_after_steps", "schedule.eval_interval", "schedule.eval_rows",
             "schedule.checkpoint_interval", "schedule.keep_checkpoints", "schedule.micro_rows"}
_ADDED = ("run.seed", "run.init_from")


def flatten(cfg: Config) -> dict[str, Any]:
    """Dotted key -> value, in schema order."""
    found: dict[str, Any] = {}

    def walk(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            else:
                found[prefix + name] = value

    walk("", dataclasses.asdict(cfg))
    return found


def recipe_hash(cfg: Config) -> str:
    """16 hexadecimal digits over the fields that fix the curve. Two runs of one hash must give one curve, within noise."""
    values = flatten(cfg)
    kept = {key: value for key, value in values.items()
            if key.partition(".")[0] in _SECTIONS and key not in _LEFT_OUT and not key.endswith(".name")}
    kept.update((key, values[key]) for key in _ADDED)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value in a, value in b) where the two differ."""
    left, right = flatten(a), flatten(b)
    return {key: (left[key], right[key]) for key in left if left[key] != right[key]}
