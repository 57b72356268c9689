from te_plugin.ops.qkv_rope import kernels  # noqa: F401  (registers them)
