"""QKV split + rotary embedding + quantise: fused, or the kernels of the parts one after the other. Both give the same bytes."""

from __future__ import annotations

from te_plugin.ops.checks import first_reason, wrong_arch, wrong_dtype
from te_plugin.ops.fused_checks import SEPARATE, separate_supports
from te_plugin.ops.qkv_rope.problem import LAYOUT_CODE
from te_plugin.ops.qkv_rope_quantize.problem import QkvRopeQuantizeProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register

MAX_HEAD_DIM = 1024  # the angles of a token lie in shared memory
VECTORS = 16  # both halves of a head are read eight values at a time


def attributes(problem: QkvRopeQuantizeProblem) -> tuple[int, ...]:
    """Layout code, pow2: what the compiled function takes after the tensors."""
    return (LAYOUT_CODE[problem.split.layout], int(problem.pow2_scale))


def _sm90_supports(problem: QkvRopeQuantizeProblem, target: Target) -> Supported | Unsupported:
    dim = problem.split.head_dim
    reason = first_reason(
        wrong_arch(target, "sm90"),
        "is wired for torch only" if target.framework == "jax" else None,
        wrong_dtype(problem.split.dtype, "bf16"),
        f"writes e4m3, not {problem.format}" if problem.format != "e4m3" else None,
        f"takes head_dim in multiples of {VECTORS}, not {dim}" if dim % VECTORS else None,
        f"takes head_dim up to {MAX_HEAD_DIM}, not {dim}" if dim > MAX_HEAD_DIM else None,
    )
    return Unsupported(reason) if reason else Supported("fused: q, k and v are never written in BF16")


SM90 = register(Kernel(name="sm90", op="qkv_rope_quantize", supports=_sm90_supports, library="sm90",
                       entry_points={"forward": "qkv_rope_quantize"}, attributes=attributes))

SEPARATELY = register(Kernel(name=SEPARATE, op="qkv_rope_quantize", supports=separate_supports))
