"""The GEMM kernels."""

from __future__ import annotations

from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _xla_supports(problem: GemmProblem, target: Target) -> Supported | Unsupported:
    if target.framework != "jax":
        return Unsupported("is XLA's own product, for JAX only")
    if problem.accumulate:
        return Unsupported("XLA adds into no existing array")
    if problem.scale_a is None and problem.scale_b is None:
        return Supported("XLA's product")
    if target.arch not in ("sm90", "sm100"):
        return Unsupported(f"XLA multiplies FP8 operands on NVIDIA GPUs from sm90, not on {target.arch}")
    if (problem.scale_a, problem.scale_b) != ("tensor", "tensor"):
        return Unsupported(f"XLA takes one scale an operand, not {problem.scale_a} and {problem.scale_b}")
    return Supported("XLA's FP8 product (cuBLASLt)")


XLA = register(Kernel(name="xla", op="gemm", supports=_xla_supports))


def _composite_supports(problem: GemmProblem, target: Target) -> Supported | Unsupported:
    if problem.scale_a is None and problem.scale_b is None:
        return Supported("the framework's matmul")
    return Supported("emulated: FP8 operands are dequantised (exactly), the framework's matmul multiplies in FP32")


COMPOSITE = register(Kernel(name="composite", op="gemm", supports=_composite_supports, composite=True))
