"""torch.autocast, and parameters of another dtype than the activations: outputs have the dtype that torch would give them."""

import pytest
import torch

import te_plugin.torch as tp

PRECISIONS = ["bf16", "fp8_current", "fp8_block"]
BF16 = torch.bfloat16
LAYERS = {
    "linear": lambda p: tp.Linear(128, 128, precision=p),
    "norm_linear": lambda p: tp.LayerNormLinear(128, 128, bias=True, precision=p),
    "mlp": lambda p: tp.LayerNormMLP(128, 128, precision=p),
}


def gradients(layer, x, *more):
    x = x.clone().requires_grad_()
    y = layer(x, *more)
    y.float().square().sum().backward()
    return y, x.grad, *(p.grad for p in layer.parameters())


@pytest.mark.report("pytorch/ao#568", "meta-pytorch/float8_experimental#257")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layers_compute_in_the_dtype_of_autocast_and_keep_float32_parameters(precision, make):
    torch.manual_seed(0)
    layer, x = make(precision), torch.randn(16, 128)
    exact = gradients(layer, x)
    layer.zero_grad()
    with torch.autocast("cpu", dtype=BF16):
        found = gradients(layer, x)
    assert found[0].dtype == BF16 and all(g.dtype == torch.float32 for g in found[1:])
    for got, want in zip(found, exact, strict=True):
        assert (got.float() - want).norm() < 0.1 * want.norm()  # FP8 rounds a BF16 tensor to other codes


@pytest.mark.report("pytorch/ao#568")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_experts_and_attention_under_autocast(precision):
    layer = tp.GroupedLinear(2, 128, 128, precision=precision)
    q = torch.randn(16, 2, 64)
    with torch.autocast("cpu", dtype=BF16):
        found = gradients(layer, torch.randn(16, 128), torch.tensor([9, 7]))
        out = tp.attention(q, q, q, cu_seqlens_q=torch.tensor([0, 9, 16], dtype=torch.int32))
        normed = tp.rms_norm(torch.randn(4, 128, dtype=BF16), torch.ones(128))
    assert found[0].dtype == out.dtype == normed.dtype == BF16 and all(g.dtype == torch.float32 for g in found[1:])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_float32_bias_or_weight_does_not_widen_the_output(precision):
    layer = tp.Linear(128, 128, precision=precision)
    y, dx, dw, db = gradients(layer, torch.randn(8, 128, dtype=BF16))
    assert y.dtype == dx.dtype == BF16 and dw.dtype == db.dtype == torch.float32


def test_main_grad_is_filled_under_autocast():
    layer = tp.Linear(64, 64, bias=False, accumulate_main_grad=True)
    layer.weight.main_grad = torch.zeros(64, 64)
    with torch.autocast("cpu", dtype=BF16):
        layer(torch.ones(4, 64)).sum().backward()
    assert (layer.weight.main_grad == 4).all() and layer.weight.grad is None


@pytest.mark.parametrize("shape", [(1,), (4, 1), (64,)])
def test_a_bias_of_another_shape_is_refused_and_not_spread_over_rows(shape):
    with pytest.raises(ValueError, match="bias has shape"):
        tp.linear(torch.ones(4, 128), torch.ones(128, 128), torch.ones(shape))


def test_operands_of_other_shapes_and_masks_of_numbers_are_named():
    with pytest.raises(ValueError, match=r"weight\(2, 8, 8\)"):
        tp.linear(torch.ones(4, 8), torch.ones(2, 8, 8))
    with pytest.raises(ValueError, match="row_mask is torch.int64"):
        tp.linear(torch.ones(4, 8), torch.ones(8, 8), row_mask=torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="holds no expert"):
        tp.grouped_linear(torch.ones(4, 32), torch.ones(0, 32, 32), torch.zeros(0, dtype=torch.int32), "mxfp8")
    with pytest.raises(ValueError, match="a tensor is needed, got ndarray"):
        tp.linear(torch.ones(4, 8).numpy(), torch.ones(8, 8))
    with pytest.raises(ValueError, match="cu_seqlens is torch.float32"):
        tp.positions_of(torch.tensor([0.0, 3.0]), 5)
    with pytest.raises(ValueError, match="FP8 format 'fp8'"):
        tp.quantize(torch.ones(4, 32), dtype="fp8", amax=1.0)
