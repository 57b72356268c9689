from te_plugin.ops.attention import kernels  # noqa: F401  (registers them)
