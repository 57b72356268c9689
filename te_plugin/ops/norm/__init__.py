from te_plugin.ops.norm import kernels  # noqa: F401  (registers them)
