"""The GEMM kernels."""

from __future__ import annotations

from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _composite_supports(problem: GemmProblem, target: Target) -> Supported | Unsupported:
    if problem.scale_a is None and problem.scale_b is None:
        return Supported("the framework's matmul")
    return Supported("emulated: FP8 operands are dequantised (exactly), the framework's matmul multiplies in FP32")


COMPOSITE = register(Kernel(name="composite", op="gemm", supports=_composite_supports, composite=True))
