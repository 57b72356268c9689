"""A forward under no_grad belongs to no step: it leaves no amax and no statistics behind, and in eval mode no transposed copy."""

import pytest
import torch

import te_plugin.torch as tp

LAYERS = {
    "linear": lambda **o: tp.Linear(64, 64, **o),
    "norm linear": lambda **o: tp.LayerNormLinear(64, 64, **o),
    "mlp": lambda **o: tp.LayerNormMLP(64, 64, **o),
}


def train_step(layer):
    layer(torch.ones(16, 64).requires_grad_()).sum().backward()
    tp.advance_scaling(layer)


@pytest.mark.parametrize("keep_transpose", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_evaluation_moves_no_scale(kind, keep_transpose):
    results = []
    for evaluate in (False, True):
        torch.manual_seed(0)
        layer = LAYERS[kind](precision="fp8_delayed", keep_transpose=keep_transpose)
        for _ in range(3):
            train_step(layer)
            if evaluate:
                with torch.no_grad():
                    layer(torch.full((16, 64), 1e3))
        train_step(layer)
        results.append(list(layer.state_dict().values()))
        results[-1] += [s.last_stats[name] for _, s in tp.state.states(layer) for name in sorted(s.last_stats)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", LAYERS)
def test_evaluation_makes_no_transposed_copy(kind):
    layer = LAYERS[kind](precision="fp8_current")
    with torch.no_grad():
        layer(torch.ones(16, 64))
    assert all(s._cached.data_t is None and not s.last_stats for _, s in tp.state.states(layer))


def test_evaluation_of_experts_leaves_no_statistics():
    layer = tp.GroupedLinear(2, 64, 64, precision="fp8_current")
    with torch.no_grad():
        layer(torch.ones(16, 64), torch.tensor([8, 8]))
    assert not layer.state.last_stats and layer.state._cached.data_t is None
