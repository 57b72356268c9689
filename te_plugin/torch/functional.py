"""The public functions of te_plugin for torch. Each is documented where it is defined."""

from te_plugin.torch.attention import attention
from te_plugin.torch.grouped import align_groups, grouped_linear
from te_plugin.torch.linear import linear
from te_plugin.torch.norm_linear import gated_mlp, layer_norm_linear
from te_plugin.torch.pointwise import cross_entropy, positions_of, rms_norm, rope, swiglu
from te_plugin.torch.qkv_rope import QuantizedQkv, qkv_rope, qkv_rope_quantize
from te_plugin.torch.quantize import QuantizedTensor, dequantize, quantize
from te_plugin.torch.quantize_many import quantize_many

__all__ = ["QuantizedQkv", "QuantizedTensor", "align_groups", "attention", "cross_entropy", "dequantize", "gated_mlp",
           "grouped_linear", "layer_norm_linear", "linear", "positions_of", "qkv_rope", "qkv_rope_quantize", "quantize",
           "quantize_many", "rms_norm", "rope", "swiglu"]
