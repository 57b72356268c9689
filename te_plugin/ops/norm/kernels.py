"""The RMSNorm kernels."""

from __future__ import annotations

from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, pointwise_maths, wrong_arch, wrong_dtype
from te_plugin.ops.norm.problem import NormProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _cpu_supports(problem: NormProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(wrong_arch(target, "cpu"), wrong_dtype(problem.dtype, *FLOAT_DTYPES))
    return Unsupported(reason) if reason else Supported()


CPU = register(Kernel(name="cpu", op="norm", supports=_cpu_supports, library="cpu",
                      entry_points={"forward": "rms_norm_forward", "backward": "rms_norm_backward",
                                    "residual_forward": "rms_norm_residual_forward",
                                    "residual_backward": "rms_norm_residual_backward"}))


MAX_COLUMNS = 16384  # of the sm90 kernel


def _sm90_supports(problem: NormProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
        f"holds a row in registers: at most {MAX_COLUMNS}, not {problem.columns}" if problem.columns > MAX_COLUMNS else None,
    )
    return Unsupported(reason) if reason else Supported()


SM90 = register(Kernel(name="sm90", op="norm", supports=_sm90_supports, library="sm90", entry_points=CPU.entry_points))


COMPOSITE = register(Kernel(name="composite", op="norm", supports=pointwise_maths, composite=True))
