"""QKV split + rotary embedding: one kernel, or the rotations of q and k and the framework's copies one after the other."""

from __future__ import annotations

from functools import partial

from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, pointwise_maths, wrong_arch, wrong_dtype
from te_plugin.ops.fused_checks import SEPARATE, separate_supports
from te_plugin.ops.qkv_rope.problem import LAYOUT_CODE, QkvRopeProblem
from te_plugin.ops.rope.kernels import SM90_MAX_HEAD_DIM
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def layout_attributes(problem: QkvRopeProblem) -> tuple[int, ...]:
    """What the compiled functions take after the tensors."""
    return (LAYOUT_CODE[problem.layout],)


def _sm90_supports(problem: QkvRopeProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        "is wired for torch only" if target.framework == "jax" else None,
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
        f"takes head_dim up to {SM90_MAX_HEAD_DIM}, not {problem.head_dim}" if problem.head_dim > SM90_MAX_HEAD_DIM else None,
    )
    return Unsupported(reason) if reason else Supported("fused: every head is read and written once")


SM90 = register(Kernel(name="sm90", op="qkv_rope", supports=_sm90_supports, library="sm90",
                       entry_points={"forward": "qkv_rope", "backward": "qkv_rope_backward"}, attributes=layout_attributes))

SEPARATELY = register(Kernel(name=SEPARATE, op="qkv_rope", supports=partial(separate_supports, fallback="error")))


COMPOSITE = register(Kernel(name="composite", op="qkv_rope", supports=pointwise_maths, composite=True))
