"""The quantisation kernels."""

from __future__ import annotations

from te_plugin import numerics
from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, wrong_arch, wrong_dtype
from te_plugin.ops.quantize.problem import QuantizeProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def attributes(problem: QuantizeProblem) -> tuple[int, ...]:
    code = numerics.FORMATS[problem.format].code
    if problem.delayed:
        return (code,)
    return (numerics.GRANULARITY_CODE[problem.granularity], code, int(problem.pow2_scale))


def _cpu_supports(problem: QuantizeProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(wrong_arch(target, "cpu"), wrong_dtype(problem.dtype, *FLOAT_DTYPES))
    return Unsupported(reason) if reason else Supported()


CPU = register(Kernel(
    name="cpu",
    op="quantize",
    supports=_cpu_supports,
    library="cpu",
    entry_points={
        "plain": "quantize",
        "transpose": "quantize_transpose",
        "given": "quantize_with_scale",
        "given_transpose": "quantize_with_scale_transpose",
        "dequantize": "dequantize",
    },
    attributes=attributes,
))


def _sm90_supports(problem: QuantizeProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
        f"writes the OCP formats e4m3 and e5m2, not {problem.format}" if problem.format not in ("e4m3", "e5m2") else None,
    )
    return Unsupported(reason) if reason else Supported()


# "used": only the first rows of x count, as many as a number on the device says. A kernel without it is given cleared rows.
SM90 = register(Kernel(
    name="sm90", op="quantize", supports=_sm90_supports, library="sm90", attributes=attributes,
    entry_points={**CPU.entry_points, "used": "quantize_used", "used_transpose": "quantize_used_transpose"}))
