"""The layer specification: which modules Megatron builds a llama from. No TransformerEngine, nothing patched.

Use in Megatron-LM:  --spec te_plugin.megatron layer_spec --transformer-impl local
                     --no-rope-fusion --no-gradient-accumulation-fusion --te-precision-config-file fp8.yaml
`rope_layer_spec` is the same with RoPE inside core attention (--position-embedding-type none).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from te_plugin.config import ConfigError
from te_plugin.megatron.attention import AttentionOptions, CoreAttention
from te_plugin.megatron.experts import GroupedExperts, Router
from te_plugin.megatron.linear import ColumnParallelLinear, RowParallelLinear
from te_plugin.megatron.norm import RMSNorm, SwiGLU
from te_plugin.megatron.norm_linear import GatedMLP, LayerNormColumnParallelLinear
from te_plugin.megatron.refused import refuse_model, refuse_unsupported
from te_plugin.megatron.rope import RopeOptions


class PluginSpecProvider(BackendSpecProvider):
    """Megatron's question "which module do you use for ...?", answered with this plugin's modules."""

    def __init__(self, attention: AttentionOptions = AttentionOptions(), fallback: str = "error", fuse: bool = True):
        self.attention, self.fallback, self.fuse = attention, fallback, fuse

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return self.fuse

    def column_parallel_layer_norm_linear(self) -> type | None:
        return LayerNormColumnParallelLinear if self.fuse else None

    def mlp(self, use_te_activation_func: bool):
        """The dense MLP: one call in FP8 where `fuse` is set, Megatron's own order of calls where it is not."""
        submodules = MLPSubmodules(
            linear_fc1=LayerNormColumnParallelLinear if self.fuse else ColumnParallelLinear, linear_fc2=RowParallelLinear,
            activation_func=self.activation_func() if use_te_activation_func else None)
        return partial((GatedMLP if self.fuse else MLP).as_mlp_submodule, submodules=submodules)

    def layer_norm(self, rms_norm: bool = True, for_qk: bool = False, has_residual: bool = False):
        return partial(RMSNorm, has_residual=has_residual, fallback=self.fallback)

    def core_attention(self):
        return ModuleSpec(module=CoreAttention, params={"options": self.attention})

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool):
        if moe_use_grouped_gemm:
            return partial(GroupedExperts, fallback=self.fallback)
        return partial(SequentialMLP, submodules=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=self.activation_func()))

    def activation_func(self):
        """Used by Megatron where config.use_te_activation_func is True; the name is Megatron's, the module is ours."""
        return partial(SwiGLU, fallback=self.fallback)


def layer_spec(config, vp_stage: int | None = None, *, attention: AttentionOptions = AttentionOptions(),
               fallback: str = "error", fuse: bool = True, pp_rank: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the final norm, for a TransformerConfig or Megatron-LM's GPTModelConfig.

    Positions: by Megatron's rotary module unless attention.rope is set (see rope_layer_spec).
    fallback: what framework maths on a GPU means (plan.plan): error, warn or allow. fuse: the norms belong to the linear layers
    after them (parameter layer_norm_weight), which in FP8 quantise their output where it is made; SwiGLU likewise.
    config.fused_residual_rmsnorm: norms that stand alone (all with fuse=False; a mixture's) add the residual's gradient in their
    backward, with one rounding less than a sum outside.
    ConfigError for settings that would be accepted and ignored, config.fp8 first of all.
    """
    if not isinstance(fuse, bool):
        raise ConfigError(f"fuse={fuse!r} must be True or False")
    refuse_unsupported(config)
    refuse_model(config, fuse)
    if attention.rope is not None:
        _refuse_second_rotation(getattr(config, "position_embedding_type", "none"))
    provider = PluginSpecProvider(attention, fallback, fuse)
    layers = [_layer(config, provider, _is_moe(config, index))
              for index in _layer_indices(config, vp_stage, pp_rank)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm())


def rope_layer_spec(config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """layer_spec with RoPE inside core attention. Reads rotary_base and the rope_scaling fields of Megatron-LM's model config.

    ConfigError unless position_embedding_type is "none": anything else would rotate twice or add learned positions.
    """
    _refuse_second_rotation(getattr(config, "position_embedding_type", None))
    base = getattr(config, "rotary_base", None)
    if base is None:
        raise ConfigError("rope_layer_spec reads config.rotary_base, and this config has none; use layer_spec(config, "
                          "attention=AttentionOptions(rope=RopeOptions(theta=...)))")
    for name, nothing in (("rotary_percent", 1.0), ("seq_len_interpolation_factor", None)):
        if getattr(config, name, nothing) != nothing:
            raise ConfigError(f"{name}={getattr(config, name)} is not supported: RoPE inside core attention rotates whole heads "
                              f"by whole positions. Leave it at {nothing}, or use layer_spec and Megatron's rotary module")
    rope = RopeOptions(theta=float(base))
    if getattr(config, "use_rope_scaling", False) or getattr(config, "rope_scaling", False):
        rope = replace(rope, factor=float(getattr(config, "rope_scaling_factor", 8.0)))
    return layer_spec(config, vp_stage, attention=AttentionOptions(rope=rope))


def _refuse_second_rotation(kind: str | None) -> None:
    if kind != "none":
        raise ConfigError(f"RoPE is inside core attention here, and position_embedding_type={kind!r}; set it to 'none' "
                          f"(--position-embedding-type none), or use layer_spec without AttentionOptions.rope")


def _layer(config, provider: PluginSpecProvider, moe: bool) -> ModuleSpec:
    qk_norm = provider.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    norm_is_fused = provider.fuse_layernorm_and_linear()
    norm = IdentityOp if norm_is_fused else provider.layer_norm(has_residual=True)
    linear_qkv = provider.column_parallel_layer_norm_linear() if norm_is_fused else provider.column_parallel_linear()
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=linear_qkv, core_attention=provider.core_attention(),
                linear_proj=provider.row_parallel_linear(), q_layernorm=qk_norm, k_layernorm=qk_norm)),
        self_attn_bda=get_bias_dropout_add,
        # The router reads what the experts read: its norm stands alone.
        pre_mlp_layernorm=provider.layer_norm(has_residual=True) if moe else norm,
        mlp=_moe(config, provider) if moe else provider.mlp(config.use_te_activation_func),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={} if norm_is_fused else _fused_names(moe)))


def _fused_names(moe: bool) -> dict[str, str]:
    """Checkpoints keep the names of layers whose norm is fused into the linear layer after it, fused or not."""
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    return names if moe else {**names, "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _moe(config, provider: PluginSpecProvider):
    if config.moe_shared_expert_intermediate_size is not None:
        raise ConfigError("moe_shared_expert_intermediate_size is set: shared experts are not in this specification; unset it")
    return partial(MoELayer, submodules=MoESubmodules(experts=provider.grouped_mlp_modules(bool(config.moe_grouped_gemm)),
                                                      router=Router))


def _layer_indices(config, vp_stage: int | None, pp_rank: int | None) -> range:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank))


def _is_moe(config, layer: int) -> bool:
    """moe_layer_freq: an integer n makes every n-th layer (0, n, ...) a mixture; a list says it layer by layer."""
    if not config.num_moe_experts:
        return False
    freq = config.moe_layer_freq
    return layer % freq == 0 if isinstance(freq, int) else bool(freq[layer])
