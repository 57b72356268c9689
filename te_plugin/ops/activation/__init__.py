from te_plugin.ops.activation import kernels  # noqa: F401  (registers them)
