"""The public functions of te_plugin for JAX. Each is documented where it is defined."""

from te_plugin.jax.attention import attention, attention_by_segment_ids, cu_seqlens_from_segment_ids
from te_plugin.jax.grouped import grouped_linear
from te_plugin.jax.linear import linear
from te_plugin.jax.pointwise import cross_entropy, rms_norm, rope, swiglu
from te_plugin.jax.quantize import QuantizedArray, dequantize, quantize

__all__ = [
    "QuantizedArray",
    "attention",
    "attention_by_segment_ids",
    "cross_entropy",
    "cu_seqlens_from_segment_ids",
    "dequantize",
    "grouped_linear",
    "linear",
    "quantize",
    "rms_norm",
    "rope",
    "swiglu",
]
