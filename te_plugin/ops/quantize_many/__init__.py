from te_plugin.ops.quantize_many import kernels  # noqa: F401  (registers them)
