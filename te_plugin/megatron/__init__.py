"""te_plugin for Megatron-Core: a layer specification of this plugin's modules, without TransformerEngine.

In Megatron-LM: --spec te_plugin.megatron layer_spec. In your own code: initialize(cfg), build_gpt(cfg), gpt_token_losses(...).
"""

from __future__ import annotations

import warnings

try:
    with warnings.catch_warnings():
        # Megatron warns at import that Apex and TransformerEngine are absent; this plugin stands in their place.
        warnings.simplefilter("ignore")
        import megatron.core
        import megatron.core.models.gpt.gpt_model  # noqa: F401
except ImportError as error:
    raise ImportError("te_plugin.megatron needs megatron-core 0.19: pip install 'te_plugin[megatron]'") from error

SUPPORTED = (0, 19)
_found = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
if _found != SUPPORTED:
    raise ImportError(f"te_plugin.megatron is written for megatron-core {SUPPORTED[0]}.{SUPPORTED[1]}.x, and "
                      f"{megatron.core.__version__} is installed: pip install 'megatron-core>=0.19,<0.20'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from te_plugin.megatron.attention import AttentionOptions, CoreAttention, PackedRows
    from te_plugin.megatron.build import build_gpt, build_stage, initialize, transformer_config
    from te_plugin.megatron.experts import GroupedExperts, Router
    from te_plugin.megatron.linear import ColumnParallelLinear, RowParallelLinear
    from te_plugin.megatron.loss import gpt_token_losses, model_inputs
    from te_plugin.megatron.norm import RMSNorm, SwiGLU
    from te_plugin.megatron.norm_linear import GatedMLP, LayerNormColumnParallelLinear
    from te_plugin.megatron.quant import LinearPrecision, precision_report, quant_recipe
    from te_plugin.megatron.rope import RopeOptions
    from te_plugin.megatron.spec import PluginSpecProvider, layer_spec, rope_layer_spec
    from te_plugin.megatron.weights import common_weights, fill, initialise, materialise

__all__ = [
    "AttentionOptions", "ColumnParallelLinear", "CoreAttention", "GatedMLP", "GroupedExperts", "LayerNormColumnParallelLinear",
    "LinearPrecision", "PackedRows", "PluginSpecProvider", "RMSNorm", "RopeOptions", "Router", "RowParallelLinear", "SwiGLU",
    "build_gpt", "build_stage", "common_weights", "fill", "gpt_token_losses", "initialise", "initialize", "layer_spec",
    "materialise", "model_inputs", "precision_report", "quant_recipe", "rope_layer_spec", "transformer_config",
]
