from te_plugin.ops.quantize import kernels  # noqa: F401  (registers them)
