"""One folder an op. Importing this package registers every kernel; it imports no framework."""

from te_plugin.ops import activation, attention, gemm, grouped_gemm, loss, norm, quantize, rope  # noqa: F401
