"""MaxText's configuration of a run: config.Config -> the keys that pyconfig.initialize takes.

The model, the packing and the numerics are the run's. What te_plugin.training owns (data, optimizer, schedule, checkpoints,
metrics) is switched off in MaxText.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from te_plugin.config import ConfigError
from te_plugin.maxtext.names import ATTENTION, quantization_of

# The one frequency scaling that MaxText has for llama.
LLAMA31_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def uses_scaled_rope(model) -> bool:
    return model.rope_scaling.factor != 1.0


def settings(cfg, devices: int, *, evaluation: bool = False) -> dict[str, Any]:
    """Keys for `pyconfig.initialize(config_class=TePluginConfig, **settings)`.

    devices: how many JAX devices the run takes. evaluation: FP8 runs are measured in BF16, so quantisation is left out.
    ConfigError for what MaxText's models cannot be.
    """
    model, precision, attention = cfg.model, cfg.precision, cfg.attention
    dtype = "float32" if precision.name == "fp32" else "bfloat16"
    keys: dict[str, Any] = {
        "model_name": "default",
        "override_model_config": True,
        "run_name": "te_plugin",
        "base_output_directory": ".",
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "gcs_metrics": False,
        "log_config": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "skip_jax_distributed_system": True,
        "jax_cache_dir": "",
        "hardware": _hardware(),
        "dtype": dtype,
        "weight_dtype": "float32",
        "grad_dtype": "float32",
        "decoder_block": "mixtral" if cfg.moe.num_experts else "llama2",
        "base_emb_dim": model.hidden_size,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "base_mlp_dim": cfg.moe.ffn_hidden_size if cfg.moe.num_experts else model.ffn_hidden_size,
        "base_num_decoder_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "normalization_layer_epsilon": model.norm_eps,
        "rope_max_timescale": _timescale(model),
        "logits_via_embedding": model.tie_embeddings,
        "normalize_embedding_logits": False,
        # On the CPU XLA sums BF16 products in less than FP32, which the logits of a whole step would show.
        "logits_dot_in_fp32": _hardware() == "cpu",
        "enable_dropout": False,
        "remat_policy": "none",
        "max_target_length": cfg.data.seq_len,
        "per_device_batch_size": cfg.schedule.micro_rows * data_parallel(cfg, devices) / _visible_devices(),
        "steps": 1,
        "dataset_type": "synthetic",
        "packing": True,
        "max_segments_per_seq": cfg.layout.max_segments,
        "attention": ATTENTION,
        "te_plugin_softmax_scale": 1 / math.sqrt(model.head_dim),
        "te_plugin_attention_kernel": attention.kernel,
        "te_plugin_attention_precision": "bf16" if evaluation else attention.precision,
        "te_plugin_dq_accumulation": attention.dq_accumulation,
        "te_plugin_deterministic": attention.deterministic,
        "te_plugin_fallback": cfg.run.fallback,
        "quantization": quantization_of("bf16" if evaluation else precision.name),
    }
    if not evaluation and precision.pow2_scale:
        keys["te_plugin_pow2_scale"] = True
    if not evaluation and precision.name == "fp8_delayed":
        keys |= {
            "te_plugin_amax_history_len": precision.amax_history_len,
            "te_plugin_amax_compute": precision.amax_compute,
        }
    if uses_scaled_rope(model):
        _require_llama31(model)
        keys["rope_type"] = "llama3.1"
    if cfg.moe.num_experts:
        keys |= {
            "num_experts": cfg.moe.num_experts,
            "num_experts_per_tok": cfg.moe.top_k,
            "base_moe_mlp_dim": cfg.moe.ffn_hidden_size,
            "megablox": True,
            "sparse_matmul": True,
            "float32_gate_logits": True,
        }
    return keys | mesh_settings(cfg, devices)


def mesh_settings(cfg, devices: int) -> dict[str, int]:
    """The mesh: parallel=ddp repeats the weights, fsdp2 shards them, tensor_parallel splits heads and features."""
    tensor = cfg.parallel.tensor_parallel
    if devices % tensor:
        raise ConfigError(
            f"parallel.tensor_parallel={tensor} with {devices} JAX devices: {tensor} devices hold one "
            "copy of the model; "
            f"make a multiple of {tensor} visible"
        )
    rest = devices // tensor
    fsdp = rest if cfg.parallel.name == "fsdp2" else 1
    return {"ici_tensor_parallelism": tensor, "ici_fsdp_parallelism": fsdp, "ici_data_parallelism": rest // fsdp}


def data_parallel(cfg, devices: int) -> int:
    """How many devices take rows of their own."""
    return devices // cfg.parallel.tensor_parallel


def _visible_devices() -> int:
    """MaxText multiplies its rows a device by all devices that JAX sees, also where the run takes one of them."""
    import jax

    return jax.device_count()


def _hardware() -> str:
    import jax

    return {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}[jax.default_backend()]


def _timescale(model) -> int:
    if model.rope_theta != int(model.rope_theta):
        raise ConfigError(
            f"model.rope_theta={model.rope_theta} with adapter=maxtext: MaxText takes whole numbers; round it"
        )
    return int(model.rope_theta)


def _require_llama31(model) -> None:
    for name, value in LLAMA31_SCALING.items():
        if getattr(model.rope_scaling, name) != value:
            raise ConfigError(
                f"model.rope_scaling.{name}={getattr(model.rope_scaling, name)} with adapter=maxtext: "
                "MaxText knows llama "
                f"3.1's scaling only, where it is {value}; change it, or set model.rope_scaling.factor=1"
            )


def base_config() -> str:
    """Path of MaxText's base.yml."""
    from maxtext.configs import pyconfig

    return str(Path(pyconfig.__file__).parent / "base.yml")
