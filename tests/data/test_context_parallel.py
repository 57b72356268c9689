"""Splitting packed segments over context-parallel ranks: exact row lists, real lengths, and what must be refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_plugin.data import pack, rope_indices, segment_positions, split_for_cp


@pytest.mark.report("NVIDIA/TransformerEngine#1368")
def test_rank_rows_of_four_segments_on_two_ranks():
    row = pack([4, 8, 6, 10], seq_len=32, cp=2)[0]
    first, second = (split_for_cp(row.cu_seqlens, row.cu_seqlens_padded, 2, rank) for rank in (0, 1))
    assert first.rows.tolist() == [0, 3, 4, 5, 10, 11, 12, 13, 18, 19, 20, 21, 22, 29, 30, 31]
    assert sorted([*first.rows, *second.rows]) == list(range(32))
    assert first.cu_seqlens_padded.tolist() == [0, 2, 6, 10, 16]


@pytest.mark.report("NVIDIA/TransformerEngine#1368")
def test_a_segment_that_cannot_be_cut_into_chunks_is_refused():
    with pytest.raises(ValueError, match=r"segment 2 takes 6 tokens, no multiple of 2\*cp = 4: pad it to 8"):
        split_for_cp([0, 4, 12, 18, 28], None, 2, 0)


@pytest.mark.report("NVIDIA/TransformerEngine#3331")
def test_real_tokens_are_counted_chunk_by_chunk_not_divided():
    counts = [int(split_for_cp([0, 698], [0, 704], 4, rank).cu_seqlens[-1]) for rank in range(4)]
    assert counts == [170, 176, 176, 176] and sum(counts) == 698


@pytest.mark.report("verl-project/verl#6001")
def test_a_segment_shorter_than_the_alignment_keeps_its_padding():
    row = pack([3, 1], seq_len=8, multiple=4, cp=2)[0]
    assert np.diff(row.cu_seqlens_padded).tolist() == [4, 4]
    shards = [split_for_cp(row.cu_seqlens, row.cu_seqlens_padded, 2, rank) for rank in (0, 1)]
    assert shards[0].rows[:2].tolist() == [0, 3] and shards[1].rows[:2].tolist() == [1, 2]
    assert [int(shard.cu_seqlens[1]) for shard in shards] == [1, 2]  # of the segment of 3
    assert [int(shard.cu_seqlens[-1]) for shard in shards] == [2, 2]


@pytest.mark.report("NVIDIA/Megatron-LM#5243")
def test_later_segments_do_not_reuse_the_table_rows_of_the_first():
    cu = [0, 4, 8]
    assert rope_indices(cu, cp_size=2, cp_rank=0, table="packed").tolist() == [0, 3, 4, 7]
    assert rope_indices(cu, cp_size=2, cp_rank=1, table="packed").tolist() == [1, 2, 5, 6]
    assert rope_indices(cu, cp_size=2, cp_rank=0, table="per_segment").tolist() == [0, 3, 0, 3]
    assert rope_indices(cu, cp_size=2, cp_rank=1, table="per_segment").tolist() == [1, 2, 1, 2]
    with pytest.raises(ValueError, match="table='max_length' is unknown"):
        rope_indices(cu, table="max_length")


@pytest.mark.report("NVIDIA/Megatron-LM#453")
def test_rotary_rows_without_context_parallelism_are_the_restarted_positions():
    assert rope_indices([0, 3, 5]).tolist() == segment_positions([1, 1, 1, 2, 2]).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("cp", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_ranks_that_do_not_exist_are_refused(cp, rank):
    with pytest.raises(ValueError, match="does not exist"):
        split_for_cp([0, 4], None, cp, rank)


def test_a_real_length_above_its_place_is_refused():
    with pytest.raises(ValueError, match="segment 1 has 9 tokens in a place of 8"):
        split_for_cp([0, 4, 13], [0, 4, 12], 2, 0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 4))
def test_ranks_share_every_row_once_with_equal_counts_and_a_real_prefix(lengths, cp):
    chunks = 2 * cp if cp > 1 else 1
    padded = [-(-n // chunks) * chunks for n in lengths]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.concatenate([[0], np.cumsum(padded)])
    shards = [split_for_cp(cu, starts, cp, rank) for rank in range(cp)]
    assert sorted(np.concatenate([shard.rows for shard in shards])) == list(range(starts[-1]))
    assert len({shard.rows.size for shard in shards}) == 1
    for index, (start, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
        seen = []
        for shard in shards:
            local = slice(shard.cu_seqlens_padded[index], shard.cu_seqlens_padded[index + 1])
            real = int(np.diff(shard.cu_seqlens)[index])
            positions = shard.positions[local]
            assert (positions == shard.rows[local] - start).all()
            assert (positions[:real] < length).all() and (positions[real:] >= length).all()
            seen.extend(positions[:real].tolist())
        assert sorted(seen) == list(range(length))
