"""TePluginConfig: MaxText's configuration with te_plugin's choices and keys (all prefixed te_plugin_).

What the kernels cannot do is refused here, before a model exists, by the name of the key that asks for it.
"""

from __future__ import annotations

from typing import Literal

from maxtext.configs import types
from pydantic import Field, model_validator

from te_plugin import numerics
from te_plugin.maxtext.names import ATTENTION, PluginQuantization, precision_of


class TePluginConfig(types.MaxTextConfig):
    """Pass as config_class to maxtext.configs.pyconfig.initialize; attention=te_plugin and quantization=te_plugin_* choose it."""

    quantization: None | types.QuantizationType | PluginQuantization = Field(
        types.QuantizationType.NONE,
        description="MaxText's own schemes, or "
        "te_plugin_{no_quant,fp8_current,fp8_delayed,fp8_rowwise,"
        "fp8_block,mxfp8}.",
    )
    te_plugin_softmax_scale: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Scale of q k^T. None: 1, as MaxText folds 1/sqrt(head_dim) into the initial query weights. "
        "1/sqrt(head_dim) for weights in the usual convention (Hugging Face, Megatron).",
    )
    te_plugin_attention_kernel: str = Field("auto", description="Attention kernel by name, or auto.")
    te_plugin_attention_precision: Literal["bf16", "fp8"] = Field(
        "bf16", description="bf16: the dtype of the arrays. fp8: FP8 attention."
    )
    te_plugin_dq_accumulation: Literal["fp32", "bf16"] = Field("fp32", description="Accumulator of the query gradient.")
    te_plugin_deterministic: bool = Field(
        False, description="Only attention kernels whose gradients are bit-reproducible."
    )
    te_plugin_fallback: Literal["error", "warn", "allow"] = Field(
        "error", description="What framework maths on a GPU means."
    )
    te_plugin_pow2_scale: bool = Field(
        False, description="Round FP8 scales up to powers of two (fp8_current, fp8_rowwise, fp8_block)."
    )
    te_plugin_amax_history_len: int = Field(1024, ge=1, description="Steps of amax history (fp8_delayed).")
    te_plugin_amax_compute: Literal["max", "most_recent"] = Field(
        "max", description="How the history gives the scale (fp8_delayed)."
    )
    te_plugin_segment_capacity: int = Field(0, description="Set from max_segments_per_seq and packing; not for users.")

    @model_validator(mode="after")
    def _te_plugin(self):
        problems = [*_attention_problems(self), *_quantization_problems(self), *_ignored(self)]
        if problems:
            raise ValueError("\n".join(problems))
        object.__setattr__(self, "te_plugin_segment_capacity", _capacity(self))
        return self


# Settings of MaxText's other quantisation schemes.
_OTHER_SCHEMES = (
    "quant_cfg_path",
    "quantize_kvcache",
    "replicate_quant_scale",
    "weight_block_size",
    "weight_quantization_calibration_method",
    "act_quantization_calibration_method",
    "bwd_quantization_calibration_method",
    "drhs_grad_quantization_calibration_method",
    "weight_sparsity_n",
    "weight_sparsity_m",
    "te_gmm_quantization",
    "te_comm_gemm_overlap",
)


def _capacity(config) -> int:
    """Segments a row: 1 where rows are not packed, and for synthetic data without a number (one segment a row)."""
    if config.packing and config.max_segments_per_seq > 0:
        return config.max_segments_per_seq
    return 1


def _attention_problems(config):
    if config.attention != ATTENTION:
        return
    if config.packing and config.dataset_type != "synthetic" and config.max_segments_per_seq < 1:
        yield (
            f"attention={ATTENTION} with packing=true needs max_segments_per_seq: the most segments a row may hold "
            f"(it is {config.max_segments_per_seq}, which means unknown)"
        )
    context = {
        name: getattr(config, name, 1)
        for name in (
            "ici_context_parallelism",
            "dcn_context_parallelism",
            "ici_sequence_parallelism",
            "dcn_sequence_parallelism",
            "ici_tensor_sequence_parallelism",
            "dcn_tensor_sequence_parallelism",
        )
    }
    for name, size in context.items():
        if size not in (1, None):
            yield f"attention={ATTENTION} with {name}={size}: the kernels need the tokens of a row on one device; set it to 1"
    wanted = {
        "attention_sink": "attention sinks",
        "use_ragged_attention": "ragged attention",
        "use_qk_clip": "qk-clip",
        "use_indexer": "an indexer",
        "use_chunked_prefill": "chunked prefill",
    }
    for name, what in wanted.items():
        if getattr(config, name, False):
            yield f"attention={ATTENTION} with {name}=true: {what} is not supported; set {name}=false"
    if getattr(config, "attn_logits_soft_cap", None):
        yield (
            f"attention={ATTENTION} with attn_logits_soft_cap={config.attn_logits_soft_cap}: a soft cap is not "
            "supported; leave it out"
        )
    kind = getattr(config.attention_type, "value", config.attention_type)
    if kind != "global":
        yield f"attention={ATTENTION} with attention_type={kind}: only global (causal) attention is supported"


def _quantization_problems(config):
    precision = precision_of(config.quantization)
    if precision is None:
        return
    value = getattr(config.quantization, "value", config.quantization)
    if config.use_qwix_quantization:
        yield f"quantization={value} with use_qwix_quantization=true: each would quantise; set use_qwix_quantization=false"
    for name in _OTHER_SCHEMES:
        asked = getattr(config, name)
        if asked != type(config).model_fields[name].default:
            yield f"{name}={getattr(asked, 'value', asked)} would be ignored with quantization={value}; leave it out"
    if getattr(config.shard_mode, "value", config.shard_mode) != "auto":
        yield (
            f"quantization={value} with shard_mode={getattr(config.shard_mode, 'value', config.shard_mode)}: te_plugin's "
            "products follow shardings that XLA propagates; set shard_mode=auto"
        )
    if precision == "fp8_delayed" and config.gradient_accumulation_steps > 1:
        yield (
            f"quantization={value} with gradient_accumulation_steps={config.gradient_accumulation_steps}: MaxText "
            "drops the state of "
            f"all but one microbatch; set gradient_accumulation_steps=1, or use te_plugin_fp8_current"
        )
    if config.num_experts > 1:
        if precision in ("fp8_delayed", "mxfp8"):
            yield (
                f"quantization={value} with num_experts={config.num_experts}: experts run in te_plugin_no_quant, "
                f"te_plugin_fp8_current, te_plugin_fp8_rowwise or te_plugin_fp8_block; choose one of those"
            )
        if not config.sparse_matmul or not config.megablox or config.use_tokamax_gmm:
            yield (
                f"quantization={value} with num_experts={config.num_experts} needs sparse_matmul=true, megablox=true and "
                f"use_tokamax_gmm=false: te_plugin's grouped GEMM takes the place of megablox"
            )


def _ignored(config):
    """Keys that would mean nothing."""
    fields = type(config).model_fields
    changed = {
        name for name in fields if name.startswith("te_plugin_") and getattr(config, name) != fields[name].default
    }
    changed.discard("te_plugin_segment_capacity")
    if config.te_plugin_segment_capacity not in (0, _capacity(config)):
        yield (
            f"te_plugin_segment_capacity={config.te_plugin_segment_capacity} is made from max_segments_per_seq and packing; "
            f"leave it out and set max_segments_per_seq"
        )
    precision = precision_of(config.quantization)
    kind = numerics.scaling(precision) if precision else None
    about = {
        "attention=te_plugin": (
            config.attention == ATTENTION,
            {
                "te_plugin_softmax_scale",
                "te_plugin_attention_kernel",
                "te_plugin_attention_precision",
                "te_plugin_dq_accumulation",
                "te_plugin_deterministic",
            },
        ),
        "attention=te_plugin and quantization=te_plugin_*": (
            config.attention == ATTENTION or precision is not None,
            {"te_plugin_fallback"},
        ),
        "quantization=te_plugin_fp8_delayed": (
            precision == "fp8_delayed",
            {"te_plugin_amax_history_len", "te_plugin_amax_compute"},
        ),
        "quantization=te_plugin_fp8_current, _rowwise and _block": (
            kind is not None and not kind.delayed and precision != "mxfp8",
            {"te_plugin_pow2_scale"},
        ),
    }
    for what, (applies, names) in about.items():
        for name in sorted(names & changed):
            if not applies:
                yield f"{name}={getattr(config, name)} would be ignored: it belongs to {what}; leave it out"
