"""The packed attention kernels of a GPU beside the conformance suite: lists that lie, odd memory, CUDA graphs."""

import importlib.util
import math

import pytest
import torch

import te_plugin.torch as tp
from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.plan import PlanError, Target, plan
from te_plugin.torch import cudnn_attention

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, DIM = 4, 2, 64


@pytest.fixture(params=["cudnn", "flash"])
def kernel(request) -> str:
    q, k, v = operands(16)
    try:
        tp.attention(q, k, v, cu_seqlens_q=int32([0, 16]), kernel=request.param)
    except PlanError as error:
        pytest.skip(str(error).splitlines()[0])
    return request.param


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def operands(rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return tuple(torch.randn(rows, heads, DIM, generator=generator, device="cuda").bfloat16().requires_grad_()
                 for heads in (HEADS, KV_HEADS, KV_HEADS))  # fmt: skip


def gradients(kernel: str, tensors, **lists) -> list[torch.Tensor]:
    out = tp.attention(*tensors, kernel=kernel, **lists)
    dout = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(9), device="cuda").bfloat16()
    return [out, *torch.autograd.grad(out, tensors, dout)]


@pytest.mark.parametrize("cu,padded", [
    ([0, 30, 70], None), ([0, 30, 20], None), ([0, 5, 5, 10], [0, 50, 20, 64]), ([0, 30, 60], [0, 10, 64]),
    ([0, 9, 5], [-9, 3, 64]),
])  # fmt: skip
def test_lists_that_lie_give_nan_and_no_fault(kernel, cu, padded):
    lists = {"cu_seqlens_q": int32(cu)} | ({"cu_seqlens_q_padded": int32(padded)} if padded else {})
    for tensor in gradients(kernel, operands(64), **lists):
        assert torch.isnan(tensor).all()
    torch.cuda.synchronize()
    for tensor in gradients(kernel, operands(64), cu_seqlens_q=int32([0, 30, 64])):
        assert torch.isfinite(tensor).all()


def test_nan_in_the_gaps_meets_no_segment(kernel):
    lists = {"cu_seqlens_q": int32([0, 20, 20, 50]), "cu_seqlens_q_padded": int32([3, 30, 30, 90])}
    clean = operands(96)
    rows = torch.cat([torch.arange(3, 23), torch.arange(30, 60)]).cuda()
    dirty = [torch.full_like(x, float("nan")).index_copy(0, rows, x.detach()[rows]).requires_grad_() for x in clean]
    want = gradients("composite", clean, **lists, fallback="allow")[0]
    for tensor in gradients(kernel, dirty, **lists):
        assert torch.isfinite(tensor).all()
        assert not tensor[torch.isin(torch.arange(96).cuda(), rows, invert=True)].any()
    torch.testing.assert_close(gradients(kernel, dirty, **lists)[0], want, rtol=2**-7, atol=2**-7)


def test_views_of_one_projection_and_memory_off_by_two_bytes_give_the_same(kernel):
    rows, cu = 70, int32([0, 33, 70])
    want = gradients(kernel, operands(rows), cu_seqlens_q=cu)
    width = (HEADS + 2 * KV_HEADS) * DIM
    packed = torch.cat([x.detach().flatten(1) for x in operands(rows)], dim=1)
    shifted = torch.empty(rows * width + 1, dtype=torch.bfloat16, device="cuda")[1:].view(rows, width).copy_(packed)
    for memory in (packed, shifted):
        views = memory.view(rows, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        for got, expected in zip(gradients(kernel, [x.requires_grad_() for x in views], cu_seqlens_q=cu), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=2**-8)


def test_heads_that_share_memory_give_the_same(kernel):
    q, k, v = operands(70)
    shared = [q, *(x[:, :1].detach().expand(70, KV_HEADS, DIM).requires_grad_() for x in (k, v))]
    apart = [q, *(x.detach().contiguous().requires_grad_() for x in shared[1:])]
    for got, want in zip(*(gradients(kernel, x, cu_seqlens_q=int32([0, 33, 70])) for x in (shared, apart)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2**-8)


@pytest.mark.parametrize("cu,rows", [([0, 1], 1), ([0, 0], 0), ([0], 0), ([0, 0, 0], 5), ([0], 5)])
def test_hardly_any_rows(kernel, cu, rows):
    out, *grads = gradients(kernel, operands(rows), cu_seqlens_q=int32(cu))
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    if cu == [0, 1]:
        torch.testing.assert_close(out, operands(rows)[2].repeat_interleave(HEADS // KV_HEADS, 1))
    else:
        assert not out.any()


GUARD = 256


def guarded(monkeypatch) -> list[torch.Tensor]:
    """Lets cuDNN's outputs and scratch begin and end in rows of a known value; the list holds those rows of each."""
    guards = []

    def empty(shape, dtype, device):
        values = math.prod(shape)
        whole = torch.full((values * dtype.itemsize + 2 * GUARD,), 77, dtype=torch.uint8, device=device)
        guards.extend((whole[:GUARD], whole[whole.numel() - GUARD:]))
        return whole[GUARD:whole.numel() - GUARD].view(dtype).view(shape)

    monkeypatch.setattr(cudnn_attention, "empty", empty)
    return guards


@pytest.mark.parametrize("rows,cu", [(1153, [0, 700, 1153]), (1153, [0, 1153]), (130, [0, 1, 129, 130]), (70, [0, 33, 70])])
def test_a_graph_for_more_rows_touches_none_past_the_tensors(rows, cu, monkeypatch):
    """Rows behind the operands are NaN, and memory around every output is watched."""
    if importlib.util.find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    want = gradients("cudnn", operands(rows), cu_seqlens_q=int32(cu))
    longer = [torch.cat([x.detach(), torch.full_like(x[:1], float("nan")).expand(200, -1, -1)]) for x in operands(rows)]
    guards = guarded(monkeypatch)
    got = gradients("cudnn", [x[:rows].requires_grad_() for x in longer], cu_seqlens_q=int32(cu))
    assert guards and all((guard == 77).all() for guard in guards)
    assert torch.equal(got[0], want[0])
    for one, other in zip(got[1:], want[1:], strict=True):  # dQ is added up in any order
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-8)


def test_numbers_of_rows_that_are_close_share_a_graph_whose_scratch_is_within_the_plan():
    if importlib.util.find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    caches = (cudnn_attention._forward_graph, cudnn_attention._backward_graph)
    before = [cache.cache_info().misses for cache in caches]
    for rows in (1030, 1100, 1152):
        gradients("cudnn", operands(rows), cu_seqlens_q=int32([0, 500, rows]))
    assert [cache.cache_info().misses for cache in caches] == [misses + 1 for misses in before]
    for segments, kv_heads in ((1, 8), (7, 8), (64, 4), (64, 2), (3, 1)):
        problem = AttentionProblem(1000, 1000, segments, 8, kv_heads, 64)
        made = plan(problem, Target("sm90", "torch", local=True), kernel="cudnn")
        q, k = (torch.empty(1000, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, kv_heads))
        graph = cudnn_attention._backward_graph(cudnn_attention._shape(made, q, k, k))
        assert graph.get_workspace_size() <= made.scratch_bytes, problem


def test_a_captured_call_reads_the_lists_again_when_it_is_replayed(kernel):
    tensors, cu = operands(256), int32([0, 100, 256])
    for _ in range(3):
        gradients(kernel, tensors, cu_seqlens_q=cu)
    dout = torch.randn(256, HEADS, DIM, generator=torch.Generator("cuda").manual_seed(9), device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tp.attention(*tensors, kernel=kernel, cu_seqlens_q=cu)
        grads = torch.autograd.grad(out, tensors, dout)
    for lists in ([0, 100, 256], [0, 7, 256], [0, 256, 256]):
        cu.copy_(int32(lists))
        graph.replay()
        want = gradients(kernel, tensors, cu_seqlens_q=cu)
        torch.testing.assert_close(out, want[0], rtol=0, atol=0)
        for got, expected in zip(grads, want[1:], strict=True):  # dQ is added up in any order
            torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-8)
