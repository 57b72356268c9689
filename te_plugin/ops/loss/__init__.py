from te_plugin.ops.loss import kernels  # noqa: F401  (registers them)
