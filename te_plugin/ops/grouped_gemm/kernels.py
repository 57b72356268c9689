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


def _sm90_supports(problem: GroupedGemmProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        wrong_dtype(problem.dtype, "bf16"),
        f"is wired for bf16 experts, not {problem.precision}" if problem.precision != "bf16" else None,
        f"{problem.groups} groups are more than 256" if problem.groups > 256 else None,
        f"sizes n={problem.n}, k={problem.k} must be multiples of 8" if problem.n % 8 or problem.k % 8 else None,
    )
    return Unsupported(reason) if reason else Supported()


SM90 = register(Kernel(name="sm90", op="grouped_gemm", supports=_sm90_supports, library="sm90", entry_points=CPU.entry_points))


def _composite_supports(problem: GroupedGemmProblem, target: Target) -> Supported | Unsupported:
    if target.framework == "jax":
        return Unsupported("reads the group sizes on the host, which a traced JAX computation cannot")
    return Supported("a loop over experts in framework maths; reads the group sizes on the host")


COMPOSITE = register(Kernel(name="composite", op="grouped_gemm", supports=_composite_supports, composite=True))
