"""The attention reference against exact numbers and against torch autograd in float64."""

import numpy as np
import pytest
import torch

from te_plugin import oracle

# (q length, kv length) -> expected uniform-probe outputs per mask; V is the key number.
ALIGNMENT = [
    (2, 5, "causal_bottom_right", [1.5, 2.0]),
    (5, 2, "causal_bottom_right", [0, 0, 0, 0.0, 0.5]),
    (2, 5, "causal_top_left", [0, 0.5]),
    (5, 2, "causal_top_left", [0, 0.5, 0.5, 0.5, 0.5]),
    (2, 5, "none", [2.0, 2.0]),
]


def uniform(v, q_rows, cu_q, **options):
    v = np.asarray(v, dtype=np.float64)[:, None, None] * np.ones((1, 1, 4))
    out, lse = oracle.attention_forward(np.zeros((q_rows, 1, 4)), np.zeros((len(v), 1, 4)), v, cu_q, **options)
    return out[:, 0, 0], lse[0]


@pytest.mark.parametrize("q_len,k_len,mask,expected", ALIGNMENT)
def test_each_mask_name_says_where_the_diagonal_ends(q_len, k_len, mask, expected):
    out, _ = uniform(np.arange(k_len), q_len, [0, q_len], cu_k=[0, k_len], mask=mask)
    np.testing.assert_allclose(out, expected, rtol=1e-14)


def test_lse_of_a_uniform_row_is_the_log_of_its_visible_keys():
    _, lse = uniform(np.arange(4), 4, [0, 3, 3], mask="causal")
    np.testing.assert_allclose(np.exp(lse), [1, 2, 3, 0])


def test_window_counts_both_ends():
    out, _ = uniform(np.arange(9), 9, [0, 6, 9], mask="causal", window=(2, 0))
    np.testing.assert_allclose(out, [0, 0.5, 1, 2, 3, 4, 6, 6.5, 7])
    out, _ = uniform(np.arange(5), 5, [0, 5], mask="none", window=(1, 2))
    np.testing.assert_allclose(out, [1, 1.5, 2.5, 3, 3.5])


def test_gap_rows_are_zero_and_never_read():
    starts = [0, 1, 2, 4, 8, 12, 14, 15, 16]
    cu = [0, 1, 2, 3, 7, 10, 12, 13, 14]
    v = np.full(16, np.nan)
    real = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15]
    v[real] = np.arange(14)
    out, lse = uniform(v, 16, cu, start_q=starts, start_k=starts, mask="causal")
    np.testing.assert_allclose(out[real], [0, 1, 2, 3, 3.5, 4, 4.5, 7, 7.5, 8, 10, 10.5, 12, 13])
    assert out[3] == out[11] == 0 and np.isneginf(lse[[3, 11]]).all()


@pytest.mark.parametrize(
    "arguments,problem",
    [
        (dict(cu_q=[0, 5, 3]), "decreases"),
        (dict(cu_q=[0, 9]), "rows 0..9"),
        (dict(cu_q=[1, 4]), "starts with 0"),
        (dict(cu_q=[0, 2], cu_k=[0, 4]), "causal_top_left or causal_bottom_right"),
        (dict(cu_q=[0, 2], start_q=[5, 5]), "rows 5..7"),
        (dict(cu_q=[0, 2], mask="diagonal"), "'diagonal' is unknown"),
    ],
)
def test_impossible_segments_are_refused_with_the_reason(arguments, problem):
    q = np.zeros((6, 1, 4))
    with pytest.raises(ValueError, match=problem):
        oracle.attention_forward(q, q, q, **arguments)


@pytest.mark.parametrize("mask", ["none", "causal_top_left", "causal_bottom_right"])
@pytest.mark.parametrize("window", [None, (3, None), (2, 1), (0, 0)])
def test_forward_and_gradients_equal_torch_autograd_in_float64(rng, mask, window):
    cu_q, cu_k, heads, kv_heads, dim = [0, 7, 7, 12, 15], [0, 5, 9, 18, 21], 4, 2, 6
    q, k, v = (rng.standard_normal((rows, n, dim)) for rows, n in ((15, heads), (21, kv_heads), (21, kv_heads)))
    dout = rng.standard_normal(q.shape)
    tq, tk, tv = (torch.tensor(x, requires_grad=True) for x in (q, k, v))
    parts = []
    for n in range(4):
        a, b, c, d = cu_q[n], cu_q[n + 1], cu_k[n], cu_k[n + 1]
        row = torch.arange(b - a)[:, None] + ((d - c) - (b - a) if mask == "causal_bottom_right" else 0)
        key = torch.arange(d - c)[None]
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        if mask != "none":
            seen &= key <= row
        if window is not None:
            seen &= key >= row - window[0]
            if window[1] is not None:
                seen &= key <= row + window[1]
        ks, vs = (t[c:d].repeat_interleave(heads // kv_heads, dim=1) for t in (tk, tv))
        scores = torch.einsum("qhd,khd->hqk", tq[a:b], ks) / dim**0.5
        p = torch.softmax(scores.masked_fill(~seen, -1e300), dim=-1) * seen
        parts.append(torch.einsum("hqk,khd->qhd", p, vs))
    out = torch.cat(parts)
    out.backward(torch.tensor(dout))
    got, _ = oracle.attention_forward(q, k, v, cu_q, cu_k, mask=mask, window=window)
    np.testing.assert_allclose(got, out.detach().numpy(), atol=1e-13)
    for got, want in zip(
        oracle.attention_backward(dout, q, k, v, cu_q, cu_k, mask=mask, window=window), (tq, tk, tv), strict=True
    ):
        np.testing.assert_allclose(got, want.grad.numpy(), atol=1e-13)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("window", [None, (9, None)])
def test_ring_over_context_parallel_ranks_equals_one_rank(rng, cp, window):
    lengths = [13, 0, 30, 16, 1]
    padded = [-(-n // 8) * 8 for n in lengths]
    cu, start = np.cumsum([0, *lengths]), np.cumsum([0, *padded])
    q, k, v = (rng.standard_normal((start[-1] + 3, n, 8)) for n in (4, 2, 2))
    want, want_lse = oracle.attention_forward(q, k, v, cu, start_q=start, start_k=start, window=window)
    out, lse = oracle.attention_context_parallel(q, k, v, cu, start, cp, window=window)
    np.testing.assert_allclose(out, want, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, atol=1e-13)


def test_merging_a_part_without_keys_changes_nothing(rng):
    out, lse = rng.standard_normal((3, 2, 4)), rng.standard_normal((2, 3))
    nothing = (np.zeros_like(out), np.full_like(lse, -np.inf))
    merged, merged_lse = oracle.merge_partial([nothing, (out, lse)])
    assert np.array_equal(merged, out) and np.array_equal(merged_lse, lse)
    merged, merged_lse = oracle.merge_partial([nothing, nothing])
    assert not merged.any() and np.isneginf(merged_lse).all()


@pytest.mark.report("NVIDIA/TransformerEngine#3331")
def test_tail_padding_is_shared_out_over_ranks_by_position_not_by_division():
    assert [oracle.real_lengths([0, 698], [0, 704], 4, rank)[0] for rank in range(4)] == [170, 176, 176, 176]


@pytest.mark.report("NVIDIA/TransformerEngine#1368")
def test_two_ranks_own_the_outer_and_inner_chunks_of_each_segment():
    padded = [0, 4, 12, 20, 32]
    first = oracle.rank_rows(padded, 2, 0)
    assert first.tolist() == [0, 3, 4, 5, 10, 11, 12, 13, 18, 19, 20, 21, 22, 29, 30, 31]
    assert sorted([*first, *oracle.rank_rows(padded, 2, 1)]) == list(range(32))
    with pytest.raises(ValueError, match="segment 1 has 6 padded rows"):
        oracle.rank_rows([0, 4, 10], 2, 0)
