"""A list of tensors quantised together in a few launches, or one after the other. Both give the same bytes."""

from __future__ import annotations

from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, wrong_arch, wrong_dtype
from te_plugin.ops.fused_checks import SEPARATE, quantize_attributes, separate_supports
from te_plugin.ops.quantize_many.problem import QuantizeManyProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _sm90_supports(problem: QuantizeManyProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        "is wired for torch only" if target.framework == "jax" else None,
        wrong_dtype(problem.cast.dtype, *FLOAT_DTYPES),
        f"writes e4m3, the format of weights, not {problem.cast.format}" if problem.cast.format != "e4m3" else None,
    )
    return Unsupported(reason) if reason else Supported("two to four launches for every 256 tensors")


SM90 = register(Kernel(name="sm90", op="quantize_many", supports=_sm90_supports, library="sm90",
                       entry_points={"forward": "quantize_many"}, attributes=quantize_attributes))

SEPARATELY = register(Kernel(name=SEPARATE, op="quantize_many", supports=separate_supports))
