"""torch.compile: one graph, the numbers of eager, and no recompilation for a new packing."""

import copy

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_plugin.torch as tp

PRECISIONS = ["bf16", "fp8_current", "fp8_rowwise", "fp8_block", "mxfp8"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packing(rng, tokens: int, capacity: int) -> torch.Tensor:
    """cu_seqlens[capacity + 1] of a random packing of exactly `tokens` tokens."""
    count = int(rng.integers(1, capacity + 1))
    cuts = np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False))
    edges = np.concatenate([[0], cuts, np.full(capacity + 1 - count, tokens)])
    return torch.tensor(edges, dtype=torch.int32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_linear_equals_eager(precision):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 256, generator=generator).bfloat16().requires_grad_()
    w = torch.randn(128, 256, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(24, 128, generator=generator).bfloat16()

    def run(function):
        x.grad = w.grad = None
        y = function(x, w)
        y.backward(dy)
        return y, x.grad, w.grad

    eager = run(lambda x, w: tp.linear(x, w, precision=precision))
    compiled = run(torch.compile(lambda x, w: tp.linear(x, w, precision=precision), fullgraph=True, backend="aot_eager"))
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_layers_equal_eager():
    """RMSNorm, an FP8 MLP and a delayed-scaling linear in one graph, forward and backward."""
    torch.manual_seed(0)
    mlp = tp.LayerNormMLP(128, 256, precision="fp8_current", dtype=torch.bfloat16)
    last = tp.Linear(128, 128, bias=False, precision="fp8_delayed", dtype=torch.bfloat16)
    x = torch.randn(16, 128).bfloat16()
    last(x)  # gives the weight its scale, so that both runs below start from one state

    def run(function):
        for p in (*mlp.parameters(), *last.parameters()):
            p.grad = None
        y = function(x)
        y.float().square().sum().backward()
        return [y, *(p.grad for p in (*mlp.parameters(), *last.parameters()))]

    eager = run(lambda x: last(mlp(x)))
    compiled = run(torch.compile(lambda x: last(mlp(x)), fullgraph=True, backend="aot_eager"))
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.report("allenai/OLMo-core#500")
def test_new_packings_do_not_recompile():
    rng = np.random.default_rng(0)
    tokens, capacity = 512, 16
    q = torch.randn(tokens, 4, 64, requires_grad=True)
    k, v = (torch.randn(tokens, 2, 64, requires_grad=True) for _ in range(2))
    compilations = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda cu: tp.attention(q, k, v, cu_seqlens_q=cu), fullgraph=True, backend=compilations)
    for _ in range(20):
        cu = packing(rng, tokens, capacity)
        q.grad = None
        out = compiled(cu)
        out.square().sum().backward()
        got = q.grad.clone()
        q.grad = None
        expected = tp.attention(q, k, v, cu_seqlens_q=cu)
        expected.square().sum().backward()
        assert torch.equal(out, expected) and torch.equal(got, q.grad)
    assert compilations.frame_count <= 2


def test_recompute_within_a_compiled_graph_equals_eager():
    """fp8_delayed remembers something of every forward, and a graph of a checkpoint allows no change from outside it."""
    layer = tp.Linear(64, 64, precision="fp8_delayed")
    traced = copy.deepcopy(layer)
    compiled = torch.compile(lambda x: checkpoint(traced, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    results = []
    for call, own in ((layer, layer), (compiled, traced)):
        x = torch.linspace(-1, 1, 16 * 64).view(16, 64).requires_grad_()
        y = call(x)
        y.square().mean().backward()
        results.append([y, x.grad, own.weight.grad, *own.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
