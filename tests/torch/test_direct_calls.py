"""Calls without autograd or the dispatcher: the same bits and the same state, and no derivative is dropped in silence."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import te_plugin.torch as tp
from te_plugin.plan import PlanError
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


INV_FREQ, POSITIONS = torch.linspace(0.1, 1, 8), torch.arange(6, dtype=torch.int32)
CU = torch.tensor([0, 4, 6], dtype=torch.int32)
SECOND_DERIVATIVES = {
    "rms_norm": (tp.rms_norm, (6, 32), (32,)),
    "rms_norm with residual": (lambda x, w, r: tp.rms_norm(x, w, residual=r)[0], (6, 32), (32,), (6, 32)),
    "swiglu": (tp.swiglu, (6, 32)),
    "rope": (lambda x: tp.rope(x, POSITIONS, inv_freq=INV_FREQ), (6, 2, 16)),
    "qkv_rope": (lambda x: tp.qkv_rope(x, POSITIONS, heads=2, kv_heads=1, inv_freq=INV_FREQ)[0], (6, 64)),
    "cross_entropy": (lambda x: tp.cross_entropy(x, POSITIONS.long()), (6, 32)),
    "attention": (lambda q, k, v: tp.attention(q, k, v, cu_seqlens_q=CU), (6, 2, 16), (6, 1, 16), (6, 1, 16)),
    "linear": (lambda x, w: linear(x, w, None, "fp8_current"), (6, 32), (32, 32)),
    "grouped_linear": (lambda x, w: tp.grouped_linear(x, w, CU[1:]), (10, 32), (2, 32, 32)),
    "layer_norm_linear": (lambda x, n, w: layer_norm_linear(x, n, w, precision="fp8_current"), (6, 32), (32,), (32, 32)),
    "gated_mlp": (lambda x, n, a, b: gated_mlp(x, n, a, b, precision="fp8_current"), (6, 32), (32,), (64, 32), (32, 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.float().square().sum()], ids=["linear loss", "square loss"])
def test_a_second_derivative_is_refused(name, loss):
    function, *shapes = SECOND_DERIVATIVES[name]
    leaves = [x.requires_grad_() for x in tensors(*shapes)]
    y = function(*leaves)
    with pytest.raises(NotImplementedError, match="create_graph=True asks for second derivatives"):
        torch.autograd.grad(loss(y), leaves, create_graph=True)


FP8_CALLS = {
    "quantize": lambda x, n, a, b: tp.quantize(x, transpose=True).data_t,
    "quantize_many": lambda x, n, a, b: tp.quantize_many([x, a], transpose=True)[0].data_t,
    "dequantize": lambda x, n, a, b: tp.quantize(x, granularity="row").dequantize(),
    "linear": lambda x, n, a, b: linear(x, a, None, "fp8_current"),
    "layer_norm_linear": lambda x, n, a, b: layer_norm_linear(x, n, a, precision="fp8_current", residual=x)[1],
    "gated_mlp": lambda x, n, a, b: gated_mlp(x, n, a, b, precision="fp8_current"),
}


@pytest.mark.parametrize("name", FP8_CALLS)
def test_fake_tensors_have_shapes_and_no_memory_that_a_kernel_would_read(name):
    inputs = tensors((16, 32), (32,), (64, 32), (32, 32))
    want = FP8_CALLS[name](*inputs)
    with FakeTensorMode() as mode:
        got = FP8_CALLS[name](*map(mode.from_tensor, inputs))
    assert isinstance(got, FakeTensor) and (got.shape, got.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_delayed"])
def test_a_layer_without_memory_says_so_when_it_is_called(precision):
    layer = tp.LayerNormMLP(128, 128, precision=precision, device="meta")
    with pytest.raises(PlanError, match="tensors are on meta; kernels exist for cpu and cuda"):
        layer(torch.ones(16, 128, device="meta"))
