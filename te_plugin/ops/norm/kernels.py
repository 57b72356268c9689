"""The RMSNorm kernels."""

from __future__ import annotations

from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, wrong_arch, wrong_dtype
from te_plugin.ops.norm.problem import NormProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _cpu_supports(problem: NormProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(wrong_arch(target, "cpu"), wrong_dtype(problem.dtype, *FLOAT_DTYPES))
    return Unsupported(reason) if reason else Supported()


CPU = register(Kernel(name="cpu", op="norm", supports=_cpu_supports, library="cpu",
                      entry_points={"forward": "rms_norm_forward", "backward": "rms_norm_backward"}))


def _composite_supports(problem: NormProblem, target: Target) -> Supported | Unsupported:
    return Supported("framework maths")


COMPOSITE = register(Kernel(name="composite", op="norm", supports=_composite_supports, composite=True))
