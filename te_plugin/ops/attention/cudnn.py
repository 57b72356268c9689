"""What cuDNN's packed attention is asked for, and what it asks for: sizes that a plan needs where there is no cuDNN."""

from __future__ import annotations

import functools
import importlib

from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.plan import PlanError, Target, plan

SMALLEST_STEP = 128
# Bytes of scratch for each value of q, measured with cuDNN 9.19 (docs/kernels-log.md); in all 12 to 54 by the number of kv heads.
SCRATCH_A_SEGMENT, SCRATCH_IN_ALL = 8, 54

# JAX's primitives for it: names inside JAX, because its public functions pass no offsets of segments.
JAX_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
JAX_FORWARD, JAX_BACKWARD = "_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper"


@functools.cache
def absent_in_jax() -> str | None:
    """What the installed JAX lacks of these names, or None."""
    try:
        module = importlib.import_module(JAX_MODULE)
    except ImportError:
        return JAX_MODULE
    absent = [name for name in (JAX_FORWARD, JAX_BACKWARD, "MaskType", "AttentionLayout") if not hasattr(module, name)]
    return f"{JAX_MODULE}.{absent[0]}" if absent else None


def graph_rows(rows: int) -> int:
    """The rows that a graph is built for: at most an eighth more than there are (from 1024), so that eight graphs serve every
    number of tokens up to twice as many."""
    step = max(SMALLEST_STEP, 1 << max(rows.bit_length() - 4, 0))
    return -(-rows // step) * step


def backward_scratch(problem: AttentionProblem) -> int:
    """Bytes, an upper bound: the smaller of cuDNN's two layouts (a slot for each segment, or one for all rows), plus an FP32
    number for each row and head. Head dims that are not a multiple of 16 have slots only.
    """
    if not problem.needs_backward:
        return 0
    rows = graph_rows(max(problem.tokens_q, problem.tokens_kv)) * problem.heads
    in_slots = problem.segments * rows * (SCRATCH_A_SEGMENT * problem.head_dim + 4)
    return in_slots if problem.head_dim % 16 else min(in_slots, rows * (SCRATCH_IN_ALL * problem.head_dim + 4))


def slots(segments: int) -> int:
    """Segments that JAX is given: it takes a list of one for a batch without offsets."""
    return max(segments, 2)


def xla_scratch(problem: AttentionProblem) -> int:
    """Bytes where XLA calls it: a slot of all rows for each segment, of the log-sum-exp (FP32) in the forward, of that, its copy
    and cuDNN's own scratch in the backward. XLA does not ask for cuDNN's other layout, one for all rows.
    """
    a_value = 4 if not problem.needs_backward else SCRATCH_A_SEGMENT * problem.head_dim + 8
    return slots(problem.segments) * problem.tokens_q * problem.heads * a_value


def rows_one_by_one(problem: AttentionProblem, target: Target, kernel: str, fallback: str) -> bool:
    """Whether rows of a batch, that the problem has as one pack, are calls of their own: where XLA calls cuDNN, whose slots are
    as long as all rows of a call.
    """
    try:
        return plan(problem, target, kernel, fallback).kernel.name == "xla"
    except PlanError:  # the call itself says so
        return False
