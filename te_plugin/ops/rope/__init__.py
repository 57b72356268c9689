from te_plugin.ops.rope import kernels  # noqa: F401  (registers them)
