"""row_mask: what a masked row holds, and what gradient arrives for it, reaches nothing."""

import pytest
import torch

import te_plugin.torch as tp

LAYERS = {
    "linear": lambda **o: tp.Linear(64, 64, bias=True, **o),
    "norm linear": lambda **o: tp.LayerNormLinear(64, 64, bias=True, **o),
    "mlp": lambda **o: tp.LayerNormMLP(64, 64, **o),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("precision", ["fp32", "fp8_current", "fp8_delayed"])
def test_the_gradient_of_masked_rows_reaches_nothing(precision, kind):
    mask, results = torch.arange(48) < 40, []
    for poison in (0.0, 1e4, float("nan")):
        torch.manual_seed(0)
        layer = LAYERS[kind](precision=precision)
        x, dy = torch.randn(48, 64), torch.randn(48, 64)
        dy[40:] = poison
        x.requires_grad_()
        y = layer(x, mask)
        y.backward(dy)
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        assert not y[40:].any()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
