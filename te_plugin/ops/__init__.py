"""One folder an op. Importing this package registers every kernel; it imports no framework."""

from te_plugin.ops import (  # noqa: F401
    activation,
    activation_quantize,
    attention,
    gemm,
    grouped_gemm,
    loss,
    norm,
    norm_quantize,
    qkv_rope,
    qkv_rope_quantize,
    quantize,
    quantize_many,
    rope,
)
