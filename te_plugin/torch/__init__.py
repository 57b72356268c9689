"""te_plugin for torch: functions, modules and the state of FP8 layers."""

from te_plugin.torch.convert import ConvertReport, convert
from te_plugin.torch.delayed_scaling import DelayedScaling
from te_plugin.torch.functional import (
    align_groups,
    attention,
    cross_entropy,
    dequantize,
    gated_mlp,
    grouped_linear,
    layer_norm_linear,
    linear,
    positions_of,
    qkv_rope,
    qkv_rope_quantize,
    quantize,
    quantize_many,
    rms_norm,
    rope,
    swiglu,
)
from te_plugin.torch.modules import (
    DotProductAttention,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from te_plugin.torch.qkv_rope import QuantizedQkv
from te_plugin.torch.quantize import QuantizedTensor
from te_plugin.torch.refresh import RefreshReport, refresh_weights
from te_plugin.torch.state import LinearState, advance_scaling

__all__ = [
    "ConvertReport", "DelayedScaling", "DotProductAttention", "GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear",
    "LinearState", "QuantizedQkv", "QuantizedTensor", "RMSNorm", "RefreshReport", "advance_scaling", "align_groups", "attention",
    "convert", "cross_entropy", "dequantize", "gated_mlp", "grouped_linear", "layer_norm_linear", "linear", "positions_of",
    "qkv_rope", "qkv_rope_quantize", "quantize", "quantize_many", "refresh_weights", "rms_norm", "rope", "swiglu",
]
