"""What one field may hold: the table of limits and the table of named choices.

A rule about one value is a row here; a rule about two fields is in rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from te_plugin import numerics
from te_plugin.config.identity import flatten
from te_plugin.config.loading import schema_fields
from te_plugin.config.schema import Config
from te_plugin.ops.gemm.problem import ACCUMULATIONS
from te_plugin.plan import ARCHITECTURES, FALLBACK_MODES

CHOICES: dict[str, tuple[str, ...]] = {
    "precision.name": numerics.PRECISIONS,
    "precision.weight_cache": ("per_step", "none"),
    "precision.amax_compute": ("max", "most_recent"),
    "precision.forward_accumulation": ACCUMULATIONS,
    "attention.precision": ("bf16", "fp8"),
    "attention.dq_accumulation": ("fp32", "bf16"),
    "layout.name": ("thd", "bshd"),
    "parallel.name": ("single", "ddp", "fsdp2"),
    "adapter.name": ("megatron", "maxtext"),
    "data.source": ("corpus", "text", "jsonl", "parquet", "megatron", "synthetic"),
    "data.tokenizer": ("bytes", "llama3", "hf"),
    "track.mode": ("auto", "jsonl", "wandb", "wandb_offline"),
    "check.mode": ("golden", "record", "off"),
    "run.device": ("auto", "cpu", "cuda"),
    "run.target": ("auto", *ARCHITECTURES),
    "run.fallback": FALLBACK_MODES,
    "testing.sabotage": ("none", "no_document_mask", "dq_slot0"),
}

_AT_LEAST_1 = (
    "model.num_layers", "model.hidden_size", "model.num_heads", "model.num_kv_heads", "model.head_dim", "model.ffn_hidden_size",
    "model.vocab_size", "model.rope_scaling.original_max_position", "precision.amax_history_len", "layout.max_segments",
    "parallel.tensor_parallel", "parallel.context_parallel", "parallel.pipeline_parallel", "parallel.expert_parallel",
    "moe.top_k", "schedule.tokens", "schedule.global_rows", "schedule.micro_rows", "schedule.eval_interval",
    "schedule.eval_rows", "schedule.checkpoint_interval", "schedule.keep_checkpoints", "schedule.stop_after_steps",
    "accept.seeds", "run.threads")
_AT_LEAST_0 = ("precision.bf16_layers_at_start", "precision.bf16_layers_at_end", "attention.window_left", "moe.num_experts",
               "moe.ffn_hidden_size", "moe.aux_loss_coeff", "data.seed", "run.seed", "optim.weight_decay",
               "schedule.warmup_tokens")
_ABOVE_0 = ("model.norm_eps", "model.rope_theta", "model.init_std", "model.rope_scaling.factor",
            "model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor", "optim.lr", "optim.eps",
            "optim.clip_grad", "accept.delta")

_64_BITS = ("data.seed", "run.seed", "schedule.tokens", "schedule.warmup_tokens")  # other whole numbers go to kernels as 32 bits


def _highest(key: str) -> int | None:
    """The largest whole number that a field's users can hold; None for fields that are no whole numbers."""
    if schema_fields()[key].kind is not int:
        return None
    return 2**63 - 1 if key in _64_BITS else 2**31 - 1


# key -> (lowest, highest, whether the lowest is allowed, whether the highest is)
LIMITS: dict[str, tuple[float, float | None, bool, bool]] = {
    **{key: (1, _highest(key), True, True) for key in _AT_LEAST_1},
    **{key: (0, _highest(key), True, True) for key in _AT_LEAST_0},
    **{key: (0, None, False, True) for key in _ABOVE_0},
    "data.seq_len": (2, _highest("data.seq_len"), True, True),
    "data.val_fraction": (0, 1, True, False),
    "optim.beta1": (0, 1, True, False),
    "optim.beta2": (0, 1, True, False),
    "schedule.min_lr_ratio": (0, 1, True, True),
}


def problems(cfg: Config) -> Iterator[str]:
    """One sentence for every value out of its range."""
    values = flatten(cfg)
    for key, choices in CHOICES.items():
        if values[key] not in choices:
            yield f"{key}={values[key]} does not exist; choose one of: {', '.join(choices)}"
    for key, (low, high, low_allowed, high_allowed) in LIMITS.items():
        value = values[key]
        if value is None:
            continue
        if value < low or (value == low and not low_allowed) or (
                high is not None and (value > high or (value == high and not high_allowed))):
            bounds = f"{'at least' if low_allowed else 'above'} {low}"
            if high is not None:
                bounds += f" and {'at most' if high_allowed else 'below'} {high}"
            yield f"{key}={value} is out of range; it must be {bounds}"
