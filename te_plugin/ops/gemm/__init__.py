from te_plugin.ops.gemm import kernels  # noqa: F401  (registers them)
