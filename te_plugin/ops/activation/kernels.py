"""The SwiGLU kernels."""

from __future__ import annotations

from te_plugin.ops.activation.problem import ActivationProblem
from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, pointwise_maths, wrong_arch, wrong_dtype
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _cpu_supports(problem: ActivationProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(wrong_arch(target, "cpu"), wrong_dtype(problem.dtype, *FLOAT_DTYPES))
    return Unsupported(reason) if reason else Supported()


CPU = register(Kernel(name="cpu", op="activation", supports=_cpu_supports, library="cpu",
                      entry_points={"forward": "swiglu_forward", "backward": "swiglu_backward"}))


def _sm90_supports(problem: ActivationProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
    )
    return Unsupported(reason) if reason else Supported()


SM90 = register(Kernel(name="sm90", op="activation", supports=_sm90_supports, library="sm90", entry_points=CPU.entry_points))


COMPOSITE = register(Kernel(name="composite", op="activation", supports=pointwise_maths, composite=True))
