"""Attention faults that were reported in public, each with the numbers of its report, on every kernel of this machine."""

import numpy as np
import pytest
import torch

from te_plugin import oracle
from te_plugin.data import pack, split_for_cp
from te_plugin.plan import PlanError, Target, plan, registered
from te_plugin.torch import attention

from .checking import BOUNDS, check_attention
from .problems import AttentionCase
from .reference import attention_answer, rounded_inputs
from .runners import TORCH_DTYPE, attention_problem, implementations, nan_filled_memory

PLAIN = attention_problem(AttentionCase("plain", (4,)), "fp32")
KERNELS = [kernel.name for kernel in registered("attention") if kernel.supports(PLAIN, Target("cpu", "torch"))]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def uniform(values, q_rows, kernel, heads=1, kv_heads=1, dim=64, dtype=torch.float32, **options) -> torch.Tensor:
    """Q = K = 0 and V = values in every channel: the output row is the mean of the visible values. Returns [q_rows, H]."""
    v = torch.tensor(values, dtype=dtype)[:, None, None].expand(-1, kv_heads, dim).contiguous()
    q, k = torch.zeros(q_rows, heads, dim, dtype=dtype), torch.zeros(len(values), kv_heads, dim, dtype=dtype)
    with nan_filled_memory():
        out = attention(q, k, v, kernel=kernel, fallback="allow", **options)
    assert torch.equal(out, out[..., :1].expand_as(out))
    return out[..., 0].double()


@pytest.mark.report("AI-Hypercomputer/maxtext#4476")
@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_segment_sees_nothing_of_the_first(kernel, dtype):
    out = uniform([1, 1, 1, 0, 0], 5, kernel, cu_seqlens_q=ints([0, 3, 5]), dtype=dtype)
    assert (out[3:] == 0).all()
    np.testing.assert_allclose(out[:3, 0], 1, rtol=1e-6)


GAPS = dict(cu=[0, 1, 2, 3, 7, 10, 12, 13, 14], padded=[0, 1, 2, 4, 8, 12, 14, 15, 16])
REAL = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15]


@pytest.mark.report("NVIDIA/TransformerEngine#2892")
@every_kernel
@pytest.mark.parametrize("pad", [0.0, float("nan")])
def test_padding_between_segments_keeps_the_row_count_and_the_real_rows(kernel, pad):
    values = np.full(16, pad)
    values[REAL] = np.arange(14)
    out = uniform(values.tolist(), 16, kernel, cu_seqlens_q=ints(GAPS["cu"]), cu_seqlens_q_padded=ints(GAPS["padded"]))[:, 0]
    assert out.shape == (16,)
    np.testing.assert_allclose(out[REAL], [0, 1, 2, 3, 3.5, 4, 4.5, 7, 7.5, 8, 10, 10.5, 12, 13], rtol=1e-6)
    assert out[3] == out[11] == 0


@pytest.mark.report("Dao-AILab/flash-attention#282")
@every_kernel
def test_both_diagonals_when_lengths_differ_and_plain_causal_refused(kernel):
    def run(mask, q_rows, values):
        cu_q, cu_k = ints([0, q_rows]), ints([0, len(values)])
        return uniform(values, q_rows, kernel, mask=mask, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k)[:, 0].tolist()

    assert run("causal_bottom_right", 2, range(5)) == pytest.approx([1.5, 2.0])
    assert run("causal_bottom_right", 5, [1, 2]) == pytest.approx([0, 0, 0, 1.0, 1.5])
    assert run("causal_top_left", 2, range(5)) == pytest.approx([0, 0.5])
    assert run("causal_top_left", 5, [1, 2]) == pytest.approx([1, 1.5, 1.5, 1.5, 1.5])
    with pytest.raises(ValueError, match="causal_top_left"):
        run("causal", 2, range(5))


@pytest.mark.report("Dao-AILab/flash-attention#1537")
@every_kernel
def test_decode_with_empty_segments(kernel):
    out = uniform(range(8), 2, kernel, heads=9, kv_heads=3, mask="causal_bottom_right", softmax_scale=1.0,
                  cu_seqlens_q=ints([0, 0, 1, 1, 2]), cu_seqlens_kv=ints([0, 0, 3, 3, 8]))  # fmt: skip
    np.testing.assert_allclose(out, [[1.0] * 9, [5.0] * 9], rtol=1e-6)


@pytest.mark.report("Dao-AILab/flash-attention#2562")
@every_kernel
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_of_segments_without_queries_get_no_gradient(kernel, dim):
    v = torch.arange(20.0)[:, None, None].expand(20, 1, dim).clone().requires_grad_()
    q, k = torch.zeros(8, 4, dim, requires_grad=True), torch.zeros(20, 1, dim, requires_grad=True)
    with nan_filled_memory():
        out = attention(q, k, v, cu_seqlens_q=ints([0, 0, 5, 8, 8]), cu_seqlens_kv=ints([0, 4, 11, 14, 20]),
                        mask="causal_bottom_right", kernel=kernel, fallback="allow")  # fmt: skip
        np.testing.assert_allclose(out.detach()[:, 0, 0], [5, 5.5, 6, 6.5, 7, 11, 11.5, 12], rtol=1e-6)
        out.backward(torch.ones_like(out))
    outside = [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]
    assert (k.grad[outside] == 0).all() and (v.grad[outside] == 0).all()
    one_head = v.grad[4:14, 0, 0] / 4
    want = [1.092857] * 3 + [0.759524, 0.509524, 0.309524, 0.142857, 1.833333, 0.833333, 0.333333]
    np.testing.assert_allclose(one_head, want, atol=1e-6)


@pytest.mark.report("pytorch/pytorch#176793")
@every_kernel
def test_rows_beyond_the_last_segment_are_zero_and_change_nothing(kernel):
    case = AttentionCase("surplus", (36, 72, 128), q_tail=2, heads=4, kv_heads=4)
    inputs = case.inputs()
    cu = ints(case.cu_q.tolist())
    weight = torch.eye(256).requires_grad_()
    results = []
    for rows in (236, 238):
        q, k, v, dout = (torch.from_numpy(inputs[n][:rows]).clone() for n in ("q", "k", "v", "dout"))
        for x in (q, k, v, dout):
            x[236:] = float("nan")
        for x in (q, k, v):
            x.requires_grad_()
        weight.grad = None
        with nan_filled_memory():
            out = attention(q, k, v, cu_seqlens_q=cu, kernel=kernel, fallback="allow")
            y = out.flatten(1) @ weight
            torch.autograd.backward(y, dout.flatten(1).nan_to_num(0))
        results.append((out.detach(), q.grad, k.grad, v.grad))
        assert torch.isfinite(weight.grad).all()
    for short, long in zip(*results, strict=True):
        if kernel == "composite":
            torch.testing.assert_close(short, long[:236])
        else:
            assert torch.equal(short, long[:236])
        assert (long[236:] == 0).all()


@pytest.mark.report("NVIDIA/TransformerEngine#1197")
@every_kernel
def test_a_window_counts_the_row_itself(kernel):
    out = uniform(range(2048), 2048, kernel, window=(1024, 0), cu_seqlens_q=ints([0, 2048]))[:, 0]
    np.testing.assert_allclose(out[[0, 1024, 1025, 2047]], [0, 512, 513, 1535], rtol=1e-5)
    out = uniform(range(9), 9, kernel, window=(2, 0), cu_seqlens_q=ints([0, 6, 9]))[:, 0]
    np.testing.assert_allclose(out, [0, 0.5, 1, 2, 3, 4, 6, 6.5, 7], rtol=1e-6)


@pytest.mark.report("ROCm/aiter#2229")
@every_kernel
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_one_query_over_many_keys_for_each_head_size(kernel, dim, dtype):
    halves = [1.0] * 256 + [0.0] * 256
    segments = dict(cu_seqlens_q=ints([0, 1]), cu_seqlens_kv=ints([0, 512]), mask="none")
    out = uniform(halves, 1, kernel, heads=8, kv_heads=8, dim=dim, dtype=TORCH_DTYPE[dtype], **segments)
    assert (out == 0.5).all()
    case = AttentionCase(f"one-query-{dim}", (1,), (512,), heads=8, kv_heads=8, head_dim=dim, mask="none")
    for i in implementations("attention"):
        if i.runner.name != "jax" and i.kernel.name == kernel and i.supports(attention_problem(case, dtype)):
            result = i.runner.attention(case, rounded_inputs(case, dtype), dtype, kernel)
            check_attention(case, result, attention_answer(case, dtype), BOUNDS[dtype])


@pytest.mark.report("NVIDIA/TransformerEngine#3006")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("window", [None, (1023, 0)])
@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100", "gfx942", "gfx950"])
def test_every_kernel_is_chosen_or_rejected_with_a_reason(head_dim, window, arch):
    case = AttentionCase("explain", (40, 24), heads=2, kv_heads=1, head_dim=head_dim, window=window)
    for backward in (True, False):
        problem = attention_problem(case, "bf16", needs_backward=backward)
        try:
            chosen = plan(problem, Target(arch))
        except PlanError as error:
            for kernel in registered("attention"):
                assert f"{kernel.name}: " in str(error)
            assert str(head_dim) in str(error) and arch in str(error)
        else:
            explained = dict(chosen.rejected)
            assert {chosen.kernel.name, *explained} == {k.name for k in registered("attention")}
            assert all(explained.values())


@pytest.mark.report("huggingface/nanoVLM#204")
@every_kernel
def test_flipping_a_token_of_document_one_changes_nothing_in_document_two(kernel, rng):
    embed, weights = rng.standard_normal((16, 2, 64)), rng.standard_normal((2, 3, 64, 64)) / 8
    tokens = rng.integers(0, 16, 12)

    def model(tokens):
        x = torch.from_numpy(embed[tokens]).float()
        for layer in weights:
            q, k, v = (x @ torch.from_numpy(w).float() for w in layer)
            x = x + attention(q, k, v, cu_seqlens_q=ints([0, 5, 12]), kernel=kernel, fallback="allow")
        return x

    before = model(tokens)
    tokens[0] = (tokens[0] + 1) % 16
    after = model(tokens)
    assert torch.equal(before[5:], after[5:]) and not torch.equal(before[:5], after[:5])


@pytest.mark.report("NVIDIA/TransformerEngine#3331")
@every_kernel
def test_four_context_parallel_ranks_over_a_padded_tail_equal_one_rank(kernel):
    cp, case = 4, AttentionCase("cp-tail", (698,), q_slots=(704,), heads=2, kv_heads=1)
    inputs = case.inputs()
    q, k, v = (torch.from_numpy(inputs[n]) for n in ("q", "k", "v"))
    size = 704 // (2 * cp)
    real = [max(0, min(698 - c * size, size)) for c in range(2 * cp)]
    out, lse = np.zeros(q.shape), np.full((2, 704), -np.inf)
    for mine in range(2 * cp):
        partial = []
        for other in range(mine + 1):
            rows, keys = slice(mine * size, mine * size + size), slice(other * size, other * size + size)
            part, part_lse = attention(
                q[rows], k[keys], v[keys], cu_seqlens_q=ints([0, real[mine]]), cu_seqlens_kv=ints([0, real[other]]),
                mask="causal" if mine == other else "none", kernel=kernel, fallback="allow", return_lse=True,
            )  # fmt: skip
            partial.append((part.numpy(), part_lse.numpy()))
        out[mine * size : mine * size + size], lse[:, mine * size : mine * size + size] = oracle.merge_partial(partial)
    want = attention_answer(case, "fp32")
    check_attention(case, {"out": out, "lse": lse}, want, BOUNDS["fp32"])
    shards = [split_for_cp([0, 698], [0, 704], cp, rank) for rank in range(cp)]
    assert [sum(real[c] for c in (r, 2 * cp - 1 - r)) for r in range(cp)] == [170, 176, 176, 176]
    assert [s.rows.tolist() for s in shards] == [oracle.rank_rows([0, 704], cp, rank).tolist() for rank in range(cp)]


@pytest.mark.report("NVIDIA/TransformerEngine#1368")
@every_kernel
def test_lengths_padded_for_two_ranks_give_the_unpadded_output(kernel, rng):
    lengths = [4, 8, 6, 10]
    (packed,) = pack(lengths, 32, cp=2)
    assert packed.cu_seqlens_padded.tolist()[:5] == [0, 4, 12, 20, 32] and packed.cu_seqlens.tolist()[:5] == [0, 4, 12, 18, 28]
    x = rng.standard_normal((28, 2, 64), dtype=np.float32)
    padded = np.full((32, 2, 64), np.nan, dtype=np.float32)
    rows = np.concatenate([np.arange(a, a + n) for a, n in zip([0, 4, 12, 20], lengths, strict=True)])
    padded[rows] = x
    x, padded = torch.from_numpy(x), torch.from_numpy(padded)
    tight = attention(x, x, x, cu_seqlens_q=ints([0, 4, 12, 18, 28]), kernel=kernel, fallback="allow")
    loose = attention(padded, padded, padded, cu_seqlens_q=ints([0, 4, 12, 18, 28]), kernel=kernel, fallback="allow",
                      cu_seqlens_q_padded=ints([0, 4, 12, 20, 32]))  # fmt: skip
    torch.testing.assert_close(loose[rows], tight, rtol=1e-6, atol=1e-6)
