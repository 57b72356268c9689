"""The rotary embedding kernels."""

from __future__ import annotations

from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, pointwise_maths, wrong_arch, wrong_dtype
from te_plugin.ops.rope.problem import RopeProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _cpu_supports(problem: RopeProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(wrong_arch(target, "cpu"), wrong_dtype(problem.dtype, *FLOAT_DTYPES))
    return Unsupported(reason) if reason else Supported()


CPU = register(Kernel(name="cpu", op="rope", supports=_cpu_supports, library="cpu",
                      entry_points={"forward": "rope", "backward": "rope"}))


SM90_MAX_HEAD_DIM = 2048  # the angles of a token lie in shared memory


def _sm90_supports(problem: RopeProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
        f"takes head_dim up to {SM90_MAX_HEAD_DIM}, not {problem.head_dim}" if problem.head_dim > SM90_MAX_HEAD_DIM else None,
    )
    return Unsupported(reason) if reason else Supported()


SM90 = register(Kernel(name="sm90", op="rope", supports=_sm90_supports, library="sm90", entry_points=CPU.entry_points))


COMPOSITE = register(Kernel(name="composite", op="rope", supports=pointwise_maths, composite=True))
