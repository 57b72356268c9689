"""SwiGLU and its gradient with the output quantised: fused, or the two kernels one after the other, same bytes."""

from __future__ import annotations

from te_plugin import numerics
from te_plugin.ops.activation_quantize.problem import ActivationQuantizeProblem
from te_plugin.ops.checks import first_reason
from te_plugin.ops.fused_checks import SEPARATE, quantize_attributes, separate_supports, sm90_reason
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _sm90_supports(problem: ActivationQuantizeProblem, target: Target) -> Supported | Unsupported:
    straddles = problem.gradient and problem.columns % numerics.BLOCK
    reason = first_reason(
        sm90_reason(problem.cast, problem.columns, target),
        f"writes both halves of the gradient in blocks of {numerics.BLOCK}; {problem.columns} columns are not a multiple of it"
        if straddles else None,
    )
    return Unsupported(reason) if reason else Supported("fused: the result is never written in BF16")


SM90 = register(Kernel(name="sm90", op="activation_quantize", supports=_sm90_supports, library="sm90",
                       entry_points={"forward": "swiglu_quantize", "backward": "dswiglu_quantize"},
                       attributes=quantize_attributes))

SEPARATELY = register(Kernel(name=SEPARATE, op="activation_quantize", supports=separate_supports))
