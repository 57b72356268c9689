"""NumPy float64 reference of every op: the specification that all kernels, in every language, are held to.

One file an idea:

- attention.py         packed (THD) attention, forward and backward, masks, windows, gaps
- fp8_attention.py     the same with Q, K, V, P, dO and dS in FP8
- context_parallel.py  which rows a rank owns, and how partial results are merged
- scaling.py           quantise and dequantise for every granularity, delayed scaling
- gemm.py              linear and grouped linear: forward, dgrad, wgrad, every precision
- layers.py            RMSNorm, SwiGLU, RoPE, cross-entropy
- metrics.py           how a result is compared with the reference

Nothing here is fast and nothing here shares code with a kernel: FP32 appears only where the definition says FP32
(casts and scales, RoPE angles).
"""

from te_plugin.oracle.attention import Segment, attention_backward, attention_forward, segment_table, visible_keys
from te_plugin.oracle.context_parallel import (
    attention_context_parallel,
    merge_partial,
    rank_rows,
    real_lengths,
    ring_attention,
)
from te_plugin.oracle.fp8_attention import Fp8AttentionScheme, fp8_attention_backward, fp8_attention_forward
from te_plugin.oracle.gemm import (
    align_groups,
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_linear,
    grouped_linear_backward,
    linear,
    linear_dgrad,
    linear_wgrad,
)
from te_plugin.oracle.layers import (
    cross_entropy_backward,
    cross_entropy_forward,
    qkv_heads,
    qkv_rope,
    qkv_rope_backward,
    rms_norm_backward,
    rms_norm_forward,
    rope,
    rope_inv_freq,
    swiglu_backward,
    swiglu_forward,
)
from te_plugin.oracle.metrics import Comparison, compare
from te_plugin.oracle.scaling import (
    DelayedScaling,
    Quantized,
    amax_and_nonfinite,
    dequantize,
    quantize,
    quantize_transpose,
    quantize_with_scale,
)

__all__ = [
    "Comparison",
    "DelayedScaling",
    "Fp8AttentionScheme",
    "Quantized",
    "Segment",
    "align_groups",
    "amax_and_nonfinite",
    "attention_backward",
    "attention_context_parallel",
    "attention_forward",
    "compare",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "dequantize",
    "fp8_attention_backward",
    "fp8_attention_forward",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "grouped_linear",
    "grouped_linear_backward",
    "linear",
    "linear_dgrad",
    "linear_wgrad",
    "merge_partial",
    "qkv_heads",
    "qkv_rope",
    "qkv_rope_backward",
    "quantize",
    "quantize_transpose",
    "quantize_with_scale",
    "rank_rows",
    "real_lengths",
    "ring_attention",
    "rms_norm_backward",
    "rms_norm_forward",
    "rope",
    "rope_inv_freq",
    "segment_table",
    "swiglu_backward",
    "swiglu_forward",
    "visible_keys",
]
