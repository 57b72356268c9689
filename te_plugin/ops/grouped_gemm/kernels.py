"""The grouped GEMM kernels."""

from __future__ import annotations

from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, wrong_arch, wrong_dtype
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _cpu_supports(problem: GroupedGemmProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(wrong_arch(target, "cpu"), wrong_dtype(problem.dtype, *FLOAT_DTYPES))
    if reason:
        return Unsupported(reason)
    if problem.precision in ("fp32", "bf16"):
        return Supported()
    return Supported("emulated: FP8 operands are dequantised (exactly) and multiplied in FP32")


CPU = register(Kernel(
    name="cpu",
    op="grouped_gemm",
    supports=_cpu_supports,
    library="cpu",
    entry_points={"forward": "grouped_gemm", "wgrad": "grouped_gemm_wgrad"},
))


def _composite_supports(problem: GroupedGemmProblem, target: Target) -> Supported | Unsupported:
    return Supported("a loop over experts in framework maths; reads the group sizes on the host")


COMPOSITE = register(Kernel(name="composite", op="grouped_gemm", supports=_composite_supports, composite=True))
