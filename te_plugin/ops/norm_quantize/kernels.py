"""RMSNorm with its output quantised: fused, or the two kernels one after the other. Both give the same bytes."""

from __future__ import annotations

from te_plugin.ops.checks import first_reason
from te_plugin.ops.fused_checks import SEPARATE, quantize_attributes, separate_supports, sm90_reason
from te_plugin.ops.norm.kernels import MAX_COLUMNS
from te_plugin.ops.norm_quantize.problem import NormQuantizeProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _sm90_supports(problem: NormQuantizeProblem, target: Target) -> Supported | Unsupported:
    columns = problem.cast.columns
    reason = first_reason(
        sm90_reason(problem.cast, columns, target),
        f"takes rows of at most {MAX_COLUMNS} values, not {columns}" if columns > MAX_COLUMNS else None,
    )
    return Unsupported(reason) if reason else Supported("fused: the normed tensor is never written in BF16")


SM90 = register(Kernel(name="sm90", op="norm_quantize", supports=_sm90_supports, library="sm90",
                       entry_points={"forward": "rms_norm_quantize"}, attributes=quantize_attributes))

SEPARATELY = register(Kernel(name=SEPARATE, op="norm_quantize", supports=separate_supports))
