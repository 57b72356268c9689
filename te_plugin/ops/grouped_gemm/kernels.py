"""The grouped GEMM kernels.

Entry points: "forward" and "wgrad" take plain operands, "scaled" and "scaled_wgrad" FP8 operands with their scales. A kernel
without the scaled ones is given dequantised operands, which its note says. "dgrad" sums over the second dimension of a plain
weight: the gradient for a weight [E,N,K], the forward with a weight [E,K,N]. A kernel without it is given a transposed copy.
"""

from __future__ import annotations

from te_plugin import numerics
from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, wrong_arch, wrong_dtype
from te_plugin.ops.gemm.kernels import ROW_BYTES, SCALE_KIND
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register

MOST_GROUPS = 256


def _is_fp8(problem: GroupedGemmProblem) -> bool:
    return numerics.scaling(problem.precision) is not None


def _delayed_reason(problem: GroupedGemmProblem) -> str | None:
    if _is_fp8(problem) and numerics.scaling(problem.precision).delayed:
        return "takes no fp8_delayed: an amax history belongs to one tensor, and the rows of an expert differ from step to step"
    return None


def _cpu_supports(problem: GroupedGemmProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(wrong_arch(target, "cpu"), wrong_dtype(problem.dtype, *FLOAT_DTYPES), _delayed_reason(problem))
    if reason:
        return Unsupported(reason)
    return Supported("emulated: FP8 operands are dequantised (exactly) and multiplied in FP32" if _is_fp8(problem) else "")


PLAIN_ENTRY_POINTS = {"forward": "grouped_gemm", "wgrad": "grouped_gemm_wgrad"}
CPU = register(Kernel(name="cpu", op="grouped_gemm", supports=_cpu_supports, library="cpu", entry_points=PLAIN_ENTRY_POINTS))


def _sm90_supports(problem: GroupedGemmProblem, target: Target) -> Supported | Unsupported:
    wrong = first_reason(
        wrong_arch(target, "sm90"),
        _delayed_reason(problem),
        f"{problem.groups} groups are more than {MOST_GROUPS}" if problem.groups > MOST_GROUPS else None,
        _fp8_reason(problem) if _is_fp8(problem) else _plain_reason(problem),
    )
    return Unsupported(wrong) if wrong else Supported()


def _plain_reason(problem: GroupedGemmProblem) -> str | None:
    sizes = f"sizes n={problem.n}, k={problem.k} must be multiples of 8"
    return wrong_dtype(problem.dtype, "bf16") or (sizes if problem.n % 8 or problem.k % 8 else None)


def _fp8_reason(problem: GroupedGemmProblem) -> str | None:
    (format_a, grain_a), (format_b, grain_b) = problem.operands()
    contracted, size = ("m", problem.m) if problem.stage == "wgrad" else ("k", problem.k)
    return first_reason(
        wrong_dtype(problem.dtype, "bf16", "fp32"),
        f"takes scales a tensor, a row or a block of 128, not those of {problem.precision} ({grain_a} x {grain_b}): Hopper has "
        f"no such tensor cores" if (grain_a, grain_b) not in SCALE_KIND else None,
        f"takes OCP formats, not {format_a} x {format_b}" if {format_a, format_b} - {"e4m3", "e5m2"} else None,
        f"{contracted}={size}, over which {problem.stage} sums, is not a multiple of {ROW_BYTES}" if size % ROW_BYTES else None,
    )


def _sm90_attributes(problem: GroupedGemmProblem) -> tuple[int, ...]:
    if not _is_fp8(problem):
        return ()
    (format_a, grain_a), (format_b, grain_b) = problem.operands()
    return numerics.FORMATS[format_a].code, numerics.FORMATS[format_b].code, SCALE_KIND[grain_a, grain_b]


SM90 = register(Kernel(
    name="sm90", op="grouped_gemm", supports=_sm90_supports, library="sm90", attributes=_sm90_attributes,
    entry_points={**PLAIN_ENTRY_POINTS, "dgrad": "grouped_gemm_dgrad", "scaled": "grouped_gemm_fp8",
                  "scaled_wgrad": "grouped_gemm_fp8_wgrad"}))


def _composite_supports(problem: GroupedGemmProblem, target: Target) -> Supported | Unsupported:
    if target.framework == "jax":
        return Unsupported("reads the group sizes on the host, which a traced JAX computation cannot")
    if reason := _delayed_reason(problem):
        return Unsupported(reason)
    return Supported("a loop over experts in framework maths; reads the group sizes on the host")


COMPOSITE = register(Kernel(name="composite", op="grouped_gemm", supports=_composite_supports, composite=True))
