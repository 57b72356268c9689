"""Calls without autograd or the dispatcher: the same bits and the same state, and no derivative is dropped in silence."""

import pytest
import torch
from torch.autograd import forward_ad

from te_plugin.torch.attention import attention
from te_plugin.torch.linear import _Fp8Linear, linear
from te_plugin.torch.norm_linear import gated_mlp, layer_norm_linear
from te_plugin.torch.state import LinearState


def tensors(*shapes, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def run(layer, precision, state):
    x, gain, w, w1, w2 = tensors((40, 128), (128,), (256, 128), (256, 128), (128, 128))
    for weight in (gain, w, w1, w2):
        weight.requires_grad_()
    second = state and LinearState(precision)
    calls = {"linear": lambda: linear(x, w, None, precision, state=state),
             "norm_linear": lambda: layer_norm_linear(x, gain, w, None, precision=precision, state=state),
             "mlp": lambda: gated_mlp(x, gain, w1, w2, precision=precision, states=(state, second))}
    return calls[layer]()


@pytest.mark.parametrize("layer", ["linear", "norm_linear", "mlp"])
@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_delayed", "fp8_block"])
def test_without_a_graph_the_bits_are_those_with_one_and_no_amax_counts(layer, precision):
    states = [None if precision == "bf16" else LinearState(precision) for _ in range(2)]
    with_graph = run(layer, precision, states[0])
    with torch.no_grad():
        without = run(layer, precision, states[1])
    assert with_graph.grad_fn is not None and not without.requires_grad
    assert torch.equal(with_graph, without)
    if states[0] is not None and states[0].delayed is not None:
        # An evaluation has no graph, and the forward of activation recompute is repeated with one.
        assert states[0].delayed.seen.sum() == 2 and not states[1].delayed.seen.any()
        assert not states[1].delayed.history.any() and torch.equal(states[0].delayed.scale, states[1].delayed.scale)


def test_autograd_is_left_out_where_no_graph_is_built(monkeypatch):
    x, w = tensors((32, 128), (128, 128))
    want = linear(x, w, None, "fp8_current")

    def refuse(*arguments):
        raise AssertionError("autograd was asked for a call that needs no gradient")

    monkeypatch.setattr(_Fp8Linear, "apply", refuse)
    assert torch.equal(linear(x, w, None, "fp8_current"), want)
    with pytest.raises(AssertionError, match="autograd was asked"):
        linear(x, w.requires_grad_(), None, "fp8_current")


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_a_forward_mode_derivative_is_refused(precision):
    x, w = tensors((32, 128), (128, 128))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
        linear(forward_ad.make_dual(x, x), w, None, precision)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))])
def test_a_transform_of_torch_func_is_refused_by_linear(transform):
    x, w = tensors((2, 32, 128), (128, 128))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        transform(lambda rows: linear(rows, w, None, "fp8_current"))(x)


def test_vmap_of_attention_equals_a_loop():
    q, k, v = tensors((3, 9, 2, 16), (3, 9, 2, 16), (3, 9, 2, 16))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    got = torch.func.vmap(lambda a, b, c: attention(a, b, c, cu_seqlens_q=cu))(q, k, v)
    assert torch.equal(got, torch.stack([attention(*each, cu_seqlens_q=cu) for each in zip(q, k, v, strict=True)]))
