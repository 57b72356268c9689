"""Under torch.compile: one graph, the eager numbers, and no new compilation for every new packing."""

import numpy as np
import pytest
import torch
import torch._dynamo

from te_plugin.numerics import SCALINGS
from te_plugin.torch import Linear, attention, cross_entropy, grouped_linear, linear, rms_norm, rope, swiglu

TOKENS, CAPACITY = 512, 32


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(function):
    """function compiled as one graph by the eager backend, and the list of its compilations."""
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=True), compilations


def packings(rng, count=20):
    """cu_seqlens of one capacity whose number of segments and longest segment differ from batch to batch."""
    for _ in range(count):
        cuts = np.sort(rng.choice(np.arange(1, TOKENS), rng.integers(0, CAPACITY - 1), replace=False))
        cu = np.concatenate([[0], cuts, [TOKENS]])
        yield torch.tensor(np.pad(cu, (0, CAPACITY + 1 - len(cu)), constant_values=TOKENS), dtype=torch.int32)


@pytest.mark.report("allenai/OLMo-core#500")
def test_twenty_packings_compile_at_most_twice_and_equal_eager(rng):
    weight = torch.from_numpy(rng.standard_normal((64, 128), dtype=np.float32)).requires_grad_()
    inv_freq = torch.arange(16, dtype=torch.float32) / 16

    def layer(x, cu):
        q, k, v = (x @ weight).view(TOKENS, 4, 32).split([2, 1, 1], dim=1)
        q, k = (rope(t, inv_freq=inv_freq, cu_seqlens=cu) for t in (q, k))
        return attention(q, k, v, cu_seqlens_q=cu).flatten(1)

    compiled, compilations = counted(layer)
    for cu in packings(rng):
        x = torch.from_numpy(rng.standard_normal((TOKENS, 64), dtype=np.float32)).requires_grad_()
        grads = []
        for run in (layer, compiled):
            y = run(x, cu)
            grads.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)
    assert len(compilations) <= 2


@pytest.mark.parametrize("shared", ["qkv", "kv", "qk", "none"])
def test_one_tensor_in_several_places_gets_the_gradient_of_all(shared, rng):
    cu = torch.tensor([0, 20, 48], dtype=torch.int32)
    x, y, z = (torch.from_numpy(rng.standard_normal((48, 2, 32), dtype=np.float32)).requires_grad_() for _ in range(3))
    q, k, v = {"qkv": (x, x, x), "kv": (x, y, y), "qk": (x, x, y), "none": (x, y, z)}[shared]
    compiled, _ = counted(lambda q, k, v: attention(q, k, v, cu_seqlens_q=cu))
    probe = torch.from_numpy(rng.standard_normal((48, 2, 32), dtype=np.float32))
    for leaf in {id(t): t for t in (q, k, v)}.values():
        eager = torch.autograd.grad((attention(q, k, v, cu_seqlens_q=cu) * probe).sum(), leaf)[0]
        graph = torch.autograd.grad((compiled(q, k, v) * probe).sum(), leaf)[0]
        torch.testing.assert_close(graph, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.report("allenai/OLMo-core#500")
def test_a_growing_number_of_segments_does_not_compile_without_end(rng):
    compiled, compilations = counted(lambda q, cu: attention(q, q, q, cu_seqlens_q=cu))
    q = torch.from_numpy(rng.standard_normal((TOKENS, 2, 32), dtype=np.float32))
    for segments in range(2, 12):
        cu = torch.linspace(0, TOKENS, segments + 1).int()
        assert torch.equal(compiled(q, cu), attention(q, q, q, cu_seqlens_q=cu))
    assert len(compilations) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bf16", *SCALINGS])
def test_linear_equals_eager_in_every_precision(precision, dtype, rng):
    x, dy = (torch.from_numpy(rng.standard_normal((48, 128))).to(dtype) for _ in range(2))
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        layer = Linear(128, 128, precision=precision, dtype=dtype)
        run = counted(layer)[0] if compile_it else layer
        steps = []
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.backward(dy)
            steps += [y.detach(), leaf.grad]
            if precision == "fp8_delayed":
                layer.state.advance()
                steps += [layer.state.delayed.scale.clone(), layer.state.delayed.history.clone()]
        results.append([*steps, layer.weight.grad])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_functional_linear_compiles_once_for_many_row_counts(precision, rng):
    weight = torch.from_numpy(rng.standard_normal((64, 32), dtype=np.float32))
    compiled, compilations = counted(lambda x: linear(x, weight, None, precision))
    for rows in (3, 16, 17, 40, 100, 5, 64):
        x = torch.from_numpy(rng.standard_normal((rows, 32), dtype=np.float32))
        assert torch.equal(compiled(x), linear(x, weight, None, precision))
    assert len(compilations) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_rowwise"])
def test_grouped_linear_equals_eager_and_compiles_once_for_any_sizes(precision, dtype, rng):
    weight = torch.from_numpy(rng.standard_normal((4, 32, 64))).to(dtype).requires_grad_()
    compiled, compilations = counted(lambda x, sizes: grouped_linear(x, weight, sizes, precision))
    for sizes in ([5, 0, 20, 7], [32, 0, 0, 0], [8, 8, 8, 8]):
        x = torch.from_numpy(rng.standard_normal((32, 64))).to(dtype).requires_grad_()
        results = []
        for run in (lambda x, s: grouped_linear(x, weight, s, precision), compiled):
            y = run(x, torch.tensor(sizes))
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert len(compilations) <= 2


def test_pointwise_functions_equal_eager(rng):
    weight, labels = torch.ones(32), torch.tensor([3, -100, 0, 7] * 4)
    x = torch.from_numpy(rng.standard_normal((16, 64), dtype=np.float32)).requires_grad_()

    def block(x):
        y = rms_norm(swiglu(x), weight)
        return cross_entropy(y, labels)

    compiled, compilations = counted(block)
    eager, graph = block(x), compiled(x)
    assert torch.equal(eager, graph) and len(compilations) == 1
    gradients = [torch.autograd.grad(loss.sum(), x)[0] for loss in (eager, graph)]
    assert torch.equal(*gradients)


def test_fake_implementations_tell_the_shapes_and_dtypes_of_the_real_ones():
    x, cu = torch.randn(16, 2, 32), torch.tensor([0, 5, 16], dtype=torch.int32)
    from te_plugin.torch.attention import AttentionOptions

    arguments = (x, x[:, :1], x[:, :1], cu, cu, cu, cu, AttentionOptions().key())
    torch.library.opcheck(torch.ops.te_plugin.attention_forward.default, arguments,
                          test_utils=("test_schema", "test_faketensor"))  # fmt: skip
