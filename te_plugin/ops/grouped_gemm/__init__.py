from te_plugin.ops.grouped_gemm import kernels  # noqa: F401  (registers them)
