"""The cross-entropy kernels."""

from __future__ import annotations

from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, pointwise_maths, wrong_arch, wrong_dtype
from te_plugin.ops.loss.problem import LossProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _cpu_supports(problem: LossProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(wrong_arch(target, "cpu"), wrong_dtype(problem.dtype, *FLOAT_DTYPES))
    return Unsupported(reason) if reason else Supported()


CPU = register(Kernel(name="cpu", op="loss", supports=_cpu_supports, library="cpu",
                      entry_points={"forward": "cross_entropy_forward", "backward": "cross_entropy_backward"}))


def _sm90_supports(problem: LossProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
    )
    return Unsupported(reason) if reason else Supported()


SM90 = register(Kernel(name="sm90", op="loss", supports=_sm90_supports, library="sm90", entry_points=CPU.entry_points))


COMPOSITE = register(Kernel(name="composite", op="loss", supports=pointwise_maths, composite=True))
