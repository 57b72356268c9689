from te_plugin.ops.activation_quantize import kernels  # noqa: F401  (registers them)
