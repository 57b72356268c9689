from te_plugin.ops.norm_quantize import kernels  # noqa: F401  (registers them)
