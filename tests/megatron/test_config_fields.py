"""Every field of Megatron's TransformerConfig is read by code that runs here, refused by name, or listed as meaning nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import megatron.core
import pytest
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_models import small_config

from te_plugin import megatron as plugin
from te_plugin.config import ConfigError

MEGATRON, OURS = Path(megatron.core.__file__).parent, Path(plugin.__file__).parent
# Megatron's files whose place this plugin takes, or that no model of this specification reaches.
NOT_HERE = re.compile(
    r"extensions/|export/|fusions/|inference/|post_training/|resharding/|ssm/|distributed/fsdp/|fp[48]_utils|model_parallel_config"
    r"|models/(T5|audio|bert|gpt/(experimental|gpt_layer|heterogeneous|moe_module)|huggingface|hybrid|mimo|multimodal|retro|vision)"
    r"|tensor_parallel/(inference_)?layers|transformer/(dot_product|experimental|fsdp_dtensor|heterogeneous|mla_qk|multi_|torch_norm"
    r"|transformer_config)|transformer/moe/(experts|paged_stash|shared_experts|token_dispatcher_inference|upcycling)")
# Fields that no such code reads, and why that is right.
SILENT = {
    "of a switch that is refused": (
        "dsa_", "linear_", "mamba_", "use_mamba_", "mtp_", "tp_comm_", "fp8_", "fp4_param", "num_layers_at_", "kitchen_",
        "moe_paged_stash_", "moe_shared_expert_", "use_grouped_gemm_for_shared_expert", "moe_single_grouped_"),
    "of inference": ("inference_", "nccl_all_reduce_for_prefill", "moe_pad_experts_for_cuda_graph_inference"),
    "read where the configuration is made: it sets or checks other fields": (
        "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards", "embedding_init_method_std", "mup_",
        "disable_bf16_reduced_precision_matmul", "moe_router_padding_for_fp8", "moe_router_topk_limited_devices",
        "moe_enable_deepep", "moe_layer_recompute", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope",
        "is_hybrid_model"),
    "read by the training script, which makes process groups, generators and logs": (
        "pipeline_model_parallel_comm_backend", "hierarchical_context_parallel_sizes", "expert_tensor_parallel_size",
        "use_te_rng_tracker", "moe_per_layer_logging"),
    "read by nobody in Megatron": (
        "moe_token_dropping", "moe_deepep_num_sms", "moe_hybridep_num_sms", "cuda_graph_use_single_mempool"),
    "of defer_embedding_wgrad_compute, which needs the output layer's fused accumulation": ("wgrad_deferral_limit",),
    "a permission: scores and softmax are in FP32 here always": ("attention_softmax_in_fp32",),
    "a kernel of another activation, with the same numbers": ("use_fused_weighted_squared_relu",),
}
REFUSED = {
    **dict.fromkeys(
        ["fine_grained_activation_offloading", "use_kitchen_attention", "use_inference_optimized_layers",
         "use_grouped_gemm_for_dense_mlp", "apply_residual_connection_post_layernorm", "memory_efficient_layer_norm"], True),
    "flash_attention_version": 3, "attention_backend": AttnBackend.fused, "fp8_quantizer_factory": "my.factory",
    "fp4_quantizer_factory": "my.factory", "gtp_weight_remat_size": 2, "expert_gtp_weight_remat_size": 2,
    "transformer_impl": "inference_optimized",
}


def config_with(**fields):
    cfg = small_config()
    plugin.initialize(cfg)
    config = plugin.transformer_config(cfg)
    for name, value in fields.items():
        assert hasattr(config, name) and getattr(config, name) != value
        setattr(config, name, value)
    return config


def core_attention(config, **options):
    return plugin.CoreAttention(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, **options)


def test_no_field_of_the_configuration_is_accepted_and_ignored():
    code = [path.read_text() for path in MEGATRON.rglob("*.py") if not NOT_HERE.match(str(path.relative_to(MEGATRON)))]
    megatron_reads = set(re.findall(r"config\.(\w+)|getattr\([\w.]*config, *[\"'](\w+)", "\n".join(code)))
    read = {name for pair in megatron_reads for name in pair}
    read |= set(re.findall(r"\w+", "\n".join(path.read_text() for path in OURS.glob("*.py"))))
    silent = tuple(name for names in SILENT.values() for name in names)
    fields = [field.name for field in dataclasses.fields(TransformerConfig)]
    assert len(fields) > 300
    assert [name for name in fields if name not in read and not name.startswith(silent)] == []
    assert [name for name in silent if not any(field.startswith(name) for field in fields)] == []


@pytest.mark.parametrize(("field", "value"), REFUSED.items(), ids=REFUSED)
def test_what_only_other_layers_obey_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        plugin.layer_spec(config_with(**{field: value}))


def test_none_is_not_asked_for():
    """Recipes write it for "as you like"."""
    plugin.layer_spec(config_with(attention_backend=None, gtp_weight_remat_size=None))


@pytest.mark.parametrize("fuse", [True, False])
def test_recomputation_of_norms_is_refused_before_it_fails_in_the_backward_pass(fuse):
    """Megatron's code for it names a class of TransformerEngine, whether or not a norm stands alone."""
    with pytest.raises(ConfigError, match="recompute_modules has 'layernorm'.*remove it"):
        plugin.layer_spec(config_with(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm"]), fuse=fuse)


@pytest.mark.report("NVIDIA/Megatron-LM#6059")
@pytest.mark.parametrize("freq", ["[1,0]", [1], [1, 0, 1], [1, 2], 0, None])
def test_a_pattern_of_mixtures_that_does_not_fit_the_layers_is_refused(freq):
    """Text was read letter by letter, and each letter was a mixture."""
    with pytest.raises(ConfigError, match="moe_layer_freq="):
        plugin.layer_spec(config_with(num_moe_experts=4, moe_layer_freq=freq))


@pytest.mark.parametrize(("field", "value"), [("rotary_interleaved", True), ("mrope_section", [4, 2, 2])])
def test_rotation_inside_attention_refuses_what_only_megatrons_rotary_module_does(field, value):
    config = config_with(**{field: value})
    with pytest.raises(ConfigError, match=field):
        core_attention(config, options=plugin.AttentionOptions(rope=plugin.RopeOptions(theta=1e4)))
    core_attention(config)


def test_a_window_of_one_number_is_refused_with_the_form_to_use():
    with pytest.raises(ConfigError, match=r"window_size=8 does not say which side.*\(W - 1, 0\)"):
        core_attention(config_with(window_size=8))
