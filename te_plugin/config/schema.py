"""The configuration schema: one dataclass a group, each field with its type and its meaning.

configs/ holds the values and recipes are deltas. A field without a default (MISSING) must be given by a group or a recipe.
What each value may be, and which values go together, is in rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"  # OmegaConf's mark, so that Hydra and the schema agree on what is not set


class ConfigError(ValueError):
    """The configuration cannot be run. The message says what was asked, why not, and what to change."""


@dataclass
class RopeScalingConfig:
    """Llama-3.1 frequency scaling; factor 1.0 means none."""

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass
class ModelConfig:
    """A llama: RMSNorm, SwiGLU, GQA, RoPE. Sizes in elements."""

    name: str = MISSING
    num_layers: int = MISSING
    hidden_size: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING
    ffn_hidden_size: int = MISSING
    vocab_size: int = MISSING
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    tie_embeddings: bool = False
    init_std: float = 0.02


@dataclass
class PrecisionConfig:
    """What the linear layers compute in (numerics.PRECISIONS) and how FP8 weights are cached."""

    name: str = MISSING
    weight_cache: str = "per_step"  # per_step | none
    keep_transpose: bool = True
    pow2_scale: bool = False
    amax_history_len: int = 1024
    amax_compute: str = "max"  # max | most_recent
    forward_accumulation: str = "fp32"  # fp32 | fast: y = x W^T is summed in Hopper's 14 bits (docs/numerics.md)
    fuse: bool = True  # quantise the outputs of RMSNorm and SwiGLU where they are made
    bf16_layers_at_start: int = 0
    bf16_layers_at_end: int = 0


@dataclass
class AttentionConfig:
    """The attention kernel and its numerics."""

    name: str = MISSING
    kernel: str = "auto"
    precision: str = "bf16"  # bf16 | fp8
    dq_accumulation: str = "fp32"  # fp32 | bf16
    deterministic: bool = False
    window_left: int | None = None


@dataclass
class LayoutConfig:
    """thd: documents packed into rows. bshd: one document a row, padded; the same documents in the same order."""

    name: str = MISSING  # thd | bshd
    max_segments: int = 64


@dataclass
class ParallelConfig:
    """How the run is spread over processes; the engines are torch's and Megatron's."""

    name: str = MISSING  # single | ddp | fsdp2
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    grad_accum_fusion: bool = False


@dataclass
class MoeConfig:
    """Mixture of experts; num_experts 0 is a dense model."""

    name: str = MISSING
    num_experts: int = 0
    top_k: int = 2
    ffn_hidden_size: int = 0
    grouped_gemm: bool = True
    aux_loss_coeff: float = 0.0


@dataclass
class AdapterConfig:
    name: str = MISSING  # megatron | maxtext


@dataclass
class DataConfig:
    """Where the text comes from, and the length of a packed row in tokens."""

    name: str = MISSING
    source: str = MISSING  # corpus | text | jsonl | parquet | megatron | synthetic
    path: str | None = None
    text_field: str = "text"
    tokenizer: str = "bytes"  # bytes | llama3 | hf
    tokenizer_path: str | None = None
    seq_len: int = MISSING
    shuffle: bool = True
    seed: int = 1234
    val_fraction: float = 0.05


@dataclass
class OptimConfig:
    """AdamW with FP32 master weights."""

    name: str = MISSING
    lr: float = MISSING
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = MISSING
    weight_decay: float = 0.1
    clip_grad: float = 1.0


@dataclass
class ScheduleConfig:
    """Length of the run in tokens; steps are derived from rows a step and the row length.

    global_rows: packed rows an optimizer step; micro_rows: rows a microbatch on one rank.
    stop_after_steps ends the run early without changing the schedule.
    """

    name: str = MISSING
    tokens: int = MISSING
    global_rows: int = MISSING
    micro_rows: int = MISSING
    warmup_tokens: int = 0
    min_lr_ratio: float = 0.1
    eval_interval: int = 50
    eval_rows: int = 16
    checkpoint_interval: int = 50
    keep_checkpoints: int = 2
    stop_after_steps: int | None = None


@dataclass
class TrackConfig:
    """metrics.jsonl is always written; mode says which sink mirrors it. auto: wandb_offline where wandb is installed."""

    name: str = MISSING
    mode: str = "auto"  # auto | jsonl | wandb | wandb_offline
    project: str = "te_plugin"
    entity: str | None = None
    run_name: str | None = None
    group: str | None = None


@dataclass
class CheckConfig:
    """How the loss curve is checked at the end of a run: against the recipe's golden curve, recorded as one, or not at all."""

    mode: str = "golden"  # golden | record | off
    reason: str | None = None  # required with record


@dataclass
class RunConfig:
    """Where and how the process runs; nothing here changes the model or the data.

    tune: measure the FP8 matrix products that several kernels can compute, and take the faster one of each (te_plugin/tuning.py).
    Off by default: the kernels' order is the same on every machine, while a measured choice may differ, and with it the last bits
    of a loss. kernels.json records every choice and its times.
    """

    dir: str | None = None
    resume: bool = False
    seed: int = 1234
    device: str = "auto"  # auto | cpu | cuda
    threads: int | None = None
    target: str = "auto"
    fallback: str = "error"  # error | warn | allow
    tune: bool = False
    init_from: str | None = None


@dataclass
class AcceptConfig:
    """Paired acceptance: how many seeds, and the largest endpoint gap in nats (None: from the measured twin noise)."""

    seeds: int = 3
    delta: float | None = None


@dataclass
class TestingConfig:
    """Deliberate damage, for tests that the checks can fail. Anything but none prints a banner and marks the run."""

    sabotage: str = "none"  # none | no_document_mask | dq_slot0


@dataclass
class Config:
    """One run. Every group is required; unknown keys are errors."""

    recipe: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    accept: AcceptConfig = field(default_factory=AcceptConfig)
    run: RunConfig = field(default_factory=RunConfig)
    testing: TestingConfig = field(default_factory=TestingConfig)
