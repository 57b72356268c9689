"""What cuDNN's packed attention is asked for, and what it asks for: sizes that a plan needs where there is no cuDNN."""

from __future__ import annotations

from te_plugin.ops.attention.problem import AttentionProblem

SMALLEST_STEP = 128
# Bytes of scratch for each value of q, measured with cuDNN 9.19 (docs/kernels-log.md); in all 12 to 54 by the number of kv heads.
SCRATCH_A_SEGMENT, SCRATCH_IN_ALL = 8, 54


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
