"""What of a TransformerConfig would be accepted and ignored by this plugin's modules: it is refused, by the name of the field.

Fields that Megatron's own code reads (its attention, router, dispatchers, recomputation, schedules) need no word here. A field
that only TransformerEngine's layers or other specifications read is either read by this plugin or stands here
(tests/megatron/test_config_fields.py goes through all of them).
"""

from __future__ import annotations

from megatron.core.transformer.enums import AttnBackend

from te_plugin.config import ConfigError

_SWITCHES = {
    "use_kitchen": "the layers would not be this plugin's",
    "use_kitchen_attention": "the attention would not be this plugin's",
    "use_inference_optimized_layers": "the layers would not be this plugin's",
    "use_grouped_gemm_for_dense_mlp": "dense layers are products of their own here",
    "tp_comm_overlap": "these layers do not overlap tensor-parallel communication themselves",
    "symmetric_ar_type": "symmetric-memory all-reduce is not available in these layers",
    "delay_wgrad_compute": "weight gradients are computed in the backward pass, not delayed",
    "cpu_offloading": "offloading of these layers' activations is not available",
    "fine_grained_activation_offloading": "its hooks are TransformerEngine's",
    "use_transformer_engine_op_fuser": "that fuses TransformerEngine modules",
    "fp8_param": "parameters stay in params_dtype, and FP8 copies of them are made in forward",
    "first_last_layers_bf16": "it belongs to config.fp8; match those layers to a bf16 payload in quant_recipe",
    "fp8_dot_product_attention": "it belongs to config.fp8; FP8 attention is AttentionOptions(precision='fp8')",
    "fp8_multi_head_attention": "it belongs to config.fp8; FP8 attention is AttentionOptions(precision='fp8')",
    "fp8_quantizer_factory": "it belongs to config.fp8; a quant_recipe payload says how a layer quantises",
    "fp4_quantizer_factory": "it belongs to config.fp4; a quant_recipe payload says how a layer quantises",
    "disable_parameter_transpose_cache": "it belongs to config.fp8; a quant_recipe payload says keep_transpose: false",
    "activation_func_fp8_input_store": "the input of SwiGLU is kept in params_dtype",
    "fp32_residual_connection": "norms and linear layers take activations in the dtype of their parameters",
    "apply_residual_connection_post_layernorm": "the residual is the input of the norm, in Megatron-Core's own layers too",
    "batch_invariant_mode": "kernels are chosen by shape, so a row's result may depend on the rows beside it",
    "flash_attention_version": "it chooses among TransformerEngine's kernels; AttentionOptions(kernel=...) names one of these",
    "layernorm_zero_centered_gamma": "the norm multiplies by its weight, not by one plus its weight",
    "memory_efficient_layer_norm": "the norm keeps its input for the backward pass, not its output",
    "gradient_accumulation_fusion": "the stock output layer needs an Apex extension for it; these layers fuse when a "
                                    "quant_recipe payload says main_grad: true",
}
_MODEL = ("multi_latent_attention", "qk_l2_norm", "mtp_num_layers", "experimental_attention_variant", "heterogeneous_block_specs")


def refuse_unsupported(config) -> None:
    """ConfigError for TransformerConfig fields that this plugin would otherwise accept and ignore."""
    for name in ("fp8", "fp4"):
        if getattr(config, name, None):
            raise ConfigError(
                f"config.{name}={getattr(config, name)!r}: Megatron hands this to TransformerEngine, and without it the model "
                f"would silently train in BF16. Use quant_recipe instead (te_plugin.megatron.quant_recipe, or "
                f"--te-precision-config-file with te_plugin payloads) and leave config.{name} unset")
    for name, why in _SWITCHES.items():
        if getattr(config, name, None):
            raise ConfigError(f"config.{name}={getattr(config, name)!r} is not supported: {why}. Unset it")
    backend = getattr(config, "attention_backend", None)
    if backend not in (None, AttnBackend.auto):
        raise ConfigError(f"config.attention_backend={getattr(backend, 'name', backend)} chooses among TransformerEngine's "
                          f"kernels; leave it at auto, and name a kernel of this plugin in AttentionOptions(kernel=...)")
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if (getattr(config, name, None) or 1) > 1:
            raise ConfigError(f"config.{name}={getattr(config, name)} (num_weight_shards over the tensor-parallel size): these "
                              f"layers hold their tensor-parallel shard whole; leave tensor_parallel_num_weight_shards and "
                              f"expert_tensor_parallel_num_weight_shards unset, and shard weights with FSDP")


def refuse_model(config, fuse: bool) -> None:
    """ConfigError for a model that layer_spec does not build. fuse: the norms belong to the linear layers after them."""
    if config.normalization != "RMSNorm":
        raise ConfigError(f"normalization={config.normalization!r}: this specification builds llamas; set 'RMSNorm'")
    for name in _MODEL:
        if getattr(config, name, None):
            raise ConfigError(f"config.{name}={getattr(config, name)!r} is not in this specification; unset it")
    if config.transformer_impl == "inference_optimized":
        raise ConfigError("transformer_impl='inference_optimized' asks for layers that are not this plugin's; set it to 'local'")
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or []):
        raise ConfigError("recompute_modules has 'layernorm': Megatron recomputes a norm inside TransformerEngine's FP8 context, "
                          "which fails in the first backward without that package; remove it")
    if fuse and getattr(config, "fused_residual_rmsnorm", False) and not config.num_moe_experts:
        raise ConfigError("fused_residual_rmsnorm=True: no norm of this model stands alone before a residual; unset it, or build "
                          "the specification with fuse=False")
    _refuse_layer_freq(config)


def _refuse_layer_freq(config) -> None:
    freq = config.moe_layer_freq
    if config.num_moe_experts and (freq < 1 if isinstance(freq, int) else
                                   not isinstance(freq, list | tuple) or len(freq) != config.num_layers or set(freq) - {0, 1}):
        raise ConfigError(f"moe_layer_freq={freq!r} is neither a positive integer nor a list of {config.num_layers} zeros and "
                          f"ones, one a layer (config.num_layers)")
