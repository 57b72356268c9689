"""Sizes of cuDNN's attention that are known without it."""

import pytest

from te_plugin.ops.attention.cudnn import backward_scratch, graph_rows
from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.plan import Target, plan


def test_few_graphs_serve_every_number_of_rows():
    assert [graph_rows(n) for n in (1, 128, 129, 1024, 1025, 8191, 8192, 8193)] == [128, 128, 256, 1024, 1152, 8192, 8192, 9216]
    made = {graph_rows(n) for n in range(1, 65537)}
    assert len(made) == 8 + 8 * 6
    assert all(n <= graph_rows(n) <= max(n + 127, n * 9 // 8) for n in range(1, 65537, 7))


@pytest.mark.parametrize("segments,head_dim,megabytes", [(1, 128, 269), (6, 128, 1617), (7, 128, 1813), (64, 128, 1813),
                                                         (64, 120, 16173)])  # fmt: skip
def test_the_smaller_of_two_layouts_of_scratch_is_planned(segments, head_dim, megabytes):
    """What cuDNN 9.19 asked for at 8192 rows, 32 heads, 8 kv heads, D 128: docs/kernels-log.md."""
    problem = AttentionProblem(8192, 8192, segments, 32, 8, head_dim)
    assert round(backward_scratch(problem) / 1e6) == megabytes
    made = plan(problem, Target("sm90", "torch"), kernel="cudnn")
    assert made.scratch_bytes == backward_scratch(problem) and f"at most {made.scratch_bytes} bytes" in made.explain()


def test_without_a_backward_there_is_none():
    assert backward_scratch(AttentionProblem(8192, 8192, 1, 32, 8, 128, needs_backward=False)) == 0
