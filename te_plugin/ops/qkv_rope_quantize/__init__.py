from te_plugin.ops.qkv_rope_quantize import kernels  # noqa: F401  (registers them)
