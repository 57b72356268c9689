"""Segment arithmetic: boundaries, positions, labels. Exact answers only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_plugin.data import (
    cu_seqlens_from_positions,
    cu_seqlens_from_segment_ids,
    cu_seqlens_padded_from_segment_ids,
    make_labels,
    normalise_cu_seqlens,
    segment_positions,
)

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@pytest.mark.report("axolotl-ai-cloud/axolotl#1375")
def test_boundaries_from_positions_survive_a_batch_of_two_rows():
    cu = cu_seqlens_from_positions([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    assert cu.tolist() == [0, 3, 5, 7, 10] and cu.dtype == np.int32
    assert np.diff(cu).max() == 3
    assert cu_seqlens_from_positions([0, 1, 2, 0, 1]).tolist() == [0, 3, 5]


def test_a_new_row_ends_a_segment_even_where_positions_would_go_on():
    with pytest.raises(ValueError, match=r"position_ids\[1, 0\] is 3 after the start of the row"):
        cu_seqlens_from_positions([[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("positions", [[0, 1, 3], [1, 2, 3], [0, 1, 1], [0, 2, 0], [0, 1, -1]])
def test_positions_that_neither_go_on_nor_restart_are_refused(positions):
    with pytest.raises(ValueError, match="go on by 1 or restart at 0"):
        cu_seqlens_from_positions(positions)


def test_positions_must_be_integers():
    with pytest.raises(ValueError, match="dtype float64: expected integers"):
        cu_seqlens_from_positions([0.0, 1.0])


@pytest.mark.report("NVIDIA-NeMo/Megatron-Bridge#4400")
@pytest.mark.parametrize(
    ("given_list", "expected"),
    [
        ([0, 5, 9], [0, 5, 9]),
        ([0, 5, 9, -1, -1], [0, 5, 9]),
        ([0, 16, 40, 40, 40], [0, 16, 40, 40, 40]),
        ([[0, 5, 9, -1]], [0, 5, 9]),
        ([0], [0]),
    ],
)
def test_fixed_size_cumulative_lists_lose_fill_values_and_keep_empty_segments(given_list, expected):
    cu = normalise_cu_seqlens(given_list)
    assert cu.tolist() == expected and cu.dtype == np.int32


@pytest.mark.report("NVIDIA-NeMo/Megatron-Bridge#4400")
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0, 9, 5], "decreases from 9 to 5 at entry 2"),
        ([0, -1, 5], "fill value -1 in the middle"),
        ([3, 5], "must start with 0"),
        ([], "must start with 0"),
        ([-1, -1], "must start with 0"),
        ([[0, 5], [0, 4]], "concatenate rows"),
        ([0, 2**31], "int32"),
    ],
)
def test_cumulative_lists_that_make_no_sense_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        normalise_cu_seqlens(bad)


@pytest.mark.report("NVIDIA/TransformerEngine#2523")
def test_positions_restart_at_every_segment_id():
    ids = [1, 1, 1, 2, 2, 0, 0, 0]
    assert segment_positions(ids)[:5].tolist() == [0, 1, 2, 0, 1]
    two_rows = segment_positions([ids, [7, 7, 3, 3, 3, 3, 0, 0]])
    assert two_rows.shape == (2, 8) and two_rows[1, :6].tolist() == [0, 1, 0, 1, 2, 3]


@pytest.mark.report("NVIDIA/TransformerEngine#2892")
def test_segment_ids_with_gaps_give_real_lengths_and_start_offsets_apart():
    ids = [0 if c == "0" else ord(c) for c in "abc0ddddeee0ffgh"]
    assert cu_seqlens_from_segment_ids(ids).tolist() == [0, 1, 2, 3, 7, 10, 12, 13, 14]
    assert cu_seqlens_padded_from_segment_ids(ids).tolist() == [0, 1, 2, 4, 8, 12, 14, 15, 16]


def test_equal_segment_ids_in_two_rows_are_two_segments():
    assert cu_seqlens_from_segment_ids([[1, 1, 2], [1, 2, 2]]).tolist() == [0, 2, 3, 4, 6]
    assert cu_seqlens_from_segment_ids([[1, 1, 1], [1, 1, 1]]).tolist() == [0, 3, 6]


def test_a_segment_id_that_comes_back_is_refused():
    with pytest.raises(ValueError, match="segment id 1 appears in two places of row 1"):
        cu_seqlens_from_segment_ids([[1, 1, 2], [1, 2, 1]])
    with pytest.raises(ValueError, match="negative id"):
        segment_positions([1, -1])


@given(lengths_lists, st.integers(0, 9))
def test_positions_ids_and_boundaries_agree_on_any_packing(lengths, tail):
    cu = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    positions = segment_positions(ids)
    assert cu_seqlens_from_positions(positions).tolist() == cu.tolist()
    assert cu_seqlens_from_segment_ids(ids).tolist() == cu.tolist()
    padded = np.concatenate([ids, np.zeros(tail, int)])
    assert cu_seqlens_from_segment_ids(padded).tolist() == cu.tolist()
    assert cu_seqlens_padded_from_segment_ids(padded).tolist() == [*cu[:-1].tolist(), padded.size]
    assert segment_positions(padded)[: ids.size].tolist() == positions.tolist()


@pytest.mark.report("pytorch/torchtitan#4075")
def test_no_document_predicts_the_first_token_of_the_next():
    a, b, c, d, e = 11, 12, 13, 14, 15
    labels = make_labels([a, b, c, d, e], [0, 3, 5])
    assert labels.tolist() == [b, c, -100, e, -100] and labels.dtype == np.int32
    assert (labels != -100).sum() == 3
    assert make_labels([a], [0, 1]).tolist() == [-100]


def test_labels_leave_gaps_tails_and_empty_segments_alone():
    tokens = np.arange(100, 116)
    labels = make_labels(tokens, [0, 2, 2, 5], [0, 4, 4, 16])
    expected = np.full(16, -100)
    expected[0], expected[4:6] = 101, [105, 106]
    assert labels.tolist() == expected.tolist()


def test_labels_refuse_segments_outside_the_tokens():
    with pytest.raises(ValueError, match="ends at token 6, but there are 5 tokens"):
        make_labels(np.arange(5), [0, 3, 6])
    with pytest.raises(ValueError, match="2 entries and cu_seqlens_padded 3"):
        make_labels(np.arange(5), [0, 3], [0, 3, 5])


@given(lengths_lists)
def test_labels_equal_those_of_each_document_alone(lengths):
    tokens = np.arange(1, sum(lengths) + 1)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    alone = [make_labels(tokens[a:b], [0, b - a]) for a, b in zip(cu[:-1], cu[1:], strict=True)]
    assert make_labels(tokens, cu).tolist() == np.concatenate(alone).tolist()


def test_labels_refuse_segments_that_overlap():
    with pytest.raises(ValueError, match="segment 0 has 3 tokens in a place of 2"):
        make_labels(np.arange(4), [0, 3, 4], [0, 2, 4])
