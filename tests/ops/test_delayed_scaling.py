"""The state of delayed scaling against the oracle: trajectories, idle steps, groups, saving and loading."""

import io

import numpy as np
import pytest
import torch

from te_plugin import oracle
from te_plugin.numerics import E4M3, E5M2, SCALINGS
from te_plugin.torch import DelayedScaling, Linear, advance_scaling

KIND = SCALINGS["fp8_delayed"]


def tensor_of(amax: float) -> torch.Tensor:
    x = torch.zeros(2, 16)
    x[1, 3] = -amax
    return x


def step(state: DelayedScaling, operand: str, *amax: float) -> float:
    """One step with microbatches of these amaxes; returns the scale that was used."""
    used = float(state.scale[DelayedScaling.OPERANDS.index(operand)])
    for a in amax:
        assert state.quantize(tensor_of(a), operand).scale_inv.item() == np.float32(1) / np.float32(used)
    state.advance()
    return used


@pytest.mark.report("NVIDIA/TransformerEngine#814")
@pytest.mark.parametrize("operand", ["activation", "weight"])
def test_documented_trajectory_also_with_an_idle_step(operand):
    amax, used = [2, 8, 1, 0.5, 0.5, 0.5, 0.5], [1, 224, 56, 56, 56, 56, 448]
    for idle_at in (None, 0, 2, 5):
        state = DelayedScaling(KIND, history_len=4)
        index = DelayedScaling.OPERANDS.index(operand)
        for i, a in enumerate(amax):
            if i == idle_at:
                before = state.history.clone(), state.scale.clone()
                state.advance()
                assert torch.equal(state.history, before[0]) and torch.equal(state.scale, before[1])
            assert step(state, operand, a) == used[i]
        assert state.scale[index] == 896
        others = [i for i in range(3) if i != index]
        assert (state.scale[others] == 1).all() and not state.history[others].any()


@pytest.mark.report("NVIDIA/TransformerEngine#814")
def test_two_models_in_one_process_do_not_share_state():
    histories = []
    for _ in range(2):
        layer = Linear(64, 64, precision="fp8_delayed", history_len=4)
        torch.nn.init.ones_(layer.weight)
        for amax in (2.0, 8.0, 1.0):
            layer(tensor_of(amax).repeat(1, 4)).sum().backward()
            advance_scaling(layer)
        histories.append((layer.state.delayed.history.clone(), layer.state.delayed.scale.clone()))
    assert torch.equal(histories[0][0], histories[1][0]) and torch.equal(histories[0][1], histories[1][1])


@pytest.mark.parametrize("compute", ["max", "most_recent"])
@pytest.mark.parametrize("window", [1, 2, 4, 16])
def test_random_trajectories_equal_the_oracle(compute, window, rng):
    state = DelayedScaling(KIND, history_len=window, amax_compute=compute)
    expected = {name: oracle.DelayedScaling(fmt, window, compute) for name, fmt in
                zip(DelayedScaling.OPERANDS, (E4M3, E4M3, E5M2), strict=True)}  # fmt: skip
    for _ in range(40):
        ran = [name for name in DelayedScaling.OPERANDS if rng.random() < 0.8]
        used = {}
        for name in ran:
            amax = [float(np.float32(10 ** rng.uniform(-3, 3))) for _ in range(rng.integers(1, 4))]
            if rng.random() < 0.15:
                amax[0] = float(rng.choice([0.0, np.inf, np.nan]))
            used[name] = expected[name].step(*amax)
            for a in amax:
                assert state.quantize(tensor_of(a), name).scale_inv.item() == np.float32(1) / used[name]
        state.advance()
        for i, name in enumerate(DelayedScaling.OPERANDS):
            assert state.scale[i].item() == expected[name].scale, (name, compute, window)


def test_a_nan_reaches_the_result_but_not_the_history():
    state = DelayedScaling(KIND, history_len=4)
    step(state, "activation", 2.0)
    made = state.quantize(torch.full((2, 16), float("nan")), "activation")
    assert made.dequantize().isnan().all() and made.stats[1] == 32
    state.advance()
    assert state.scale[0] == 224 and torch.isfinite(state.history).all()


def test_state_is_saved_without_pickle_and_continues_where_it_was():
    state, amax = DelayedScaling(KIND, history_len=4), [2, 8, 1, 0.5, 0.5, 0.5, 0.5]
    for a in amax[:3]:
        step(state, "activation", a)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    loaded = DelayedScaling(KIND, history_len=4)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for restored in (state, loaded):
        assert [step(restored, "activation", a) for a in amax[3:]] == [56, 56, 56, 448]


@pytest.mark.report("marin-community/marin#7659")
@pytest.mark.parametrize("ends_step", [False, True], ids=["microbatch", "step"])
def test_a_first_microbatch_without_a_loss_token_decides_no_scale(ends_step):
    """Its gradient is 0; a scale of 1 would flush those that follow, 1e-6 and less, to zero."""
    layer = Linear(64, 64, bias=False, precision="fp8_delayed")
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (layer(x) * 0).sum().backward()
    if ends_step:
        advance_scaling(layer)
    (layer(x) * 1e-6).sum().backward()
    expected = 1e-6 * layer.weight.sum(0).expand(16, 64)
    assert (x.grad - expected).norm() < 0.05 * expected.norm()


def test_an_empty_first_batch_decides_no_scale():
    layer = Linear(64, 64, bias=False, precision="fp8_delayed")
    layer(torch.zeros(0, 64))
    x = torch.full((16, 64), 1e4)
    exact = torch.nn.functional.linear(x, layer.weight)
    assert (layer(x) - exact).norm() < 0.05 * exact.norm()


@pytest.mark.report("NVIDIA/Megatron-LM#709")
def test_fp8_state_may_be_missing_or_of_another_length_but_no_parameter_may():
    plain = torch.nn.Linear(16, 16)
    layer = Linear(16, 16, precision="fp8_delayed", history_len=16)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)
    with pytest.raises((KeyError, RuntimeError), match="wieght"):
        layer.load_state_dict({"wieght": plain.weight, "bias": plain.bias})
    long = Linear(16, 16, precision="fp8_delayed", history_len=1024)
    for _ in range(3):
        long(torch.full((4, 16), 2.0)).sum().backward()
        long.state.advance()
    layer.load_state_dict(long.state_dict())
    assert layer.state.delayed.history.shape == (3, 16)
    assert layer.state.delayed.scale[0] == long.state.delayed.scale[0] == 224


def test_wrong_choices_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        DelayedScaling(KIND, history_len=0)
    with pytest.raises(ValueError, match="'mean' is not one of max, most_recent"):
        DelayedScaling(KIND, amax_compute="mean")
    with pytest.raises(ValueError, match="needs no FP8 state|do nothing"):
        Linear(16, 16, precision="bf16", history_len=4)


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.double().float().half()],
                         ids=["bfloat16", "to", "twice"])  # fmt: skip
def test_casting_a_model_leaves_its_scales_and_histories_in_float32(cast):
    layer = Linear(32, 32, precision="fp8_delayed")
    layer(torch.randn(16, 32)).sum().backward()
    advance_scaling(layer)
    scaling = layer.state.delayed
    before = {name: number.clone() for name, number in scaling.state_dict().items()}
    cast(layer)
    assert layer.weight.dtype != torch.float32
    for name, number in scaling.state_dict().items():
        assert number.dtype == torch.float32 and torch.equal(number, before[name]), name
    layer(torch.randn(16, 32, dtype=layer.weight.dtype)).sum().backward()


def relative(y, exact) -> float:
    return float((y - exact).detach().norm() / exact.detach().norm())


@pytest.mark.report("pytorch/ao#1292")
@pytest.mark.parametrize("made", ["on meta", "under meta", "trained"])
def test_a_layer_that_is_emptied_keeps_numbers_that_mean_something(made):
    """to_empty leaves whatever lay in the memory; nobody else would fill the scales in."""
    if made == "under meta":
        with torch.device("meta"):
            layer = Linear(64, 64, precision="fp8_delayed")
    else:
        layer = Linear(64, 64, precision="fp8_delayed", device="meta" if made == "on meta" else None)
    if made == "trained":
        layer(torch.randn(16, 64)).sum().backward()
        advance_scaling(layer)
    before = layer.state.delayed.state_dict()
    layer.to_empty(device="cpu")
    for name, number in layer.state.delayed.state_dict().items():
        assert torch.equal(number, before[name]), name
    if made != "trained":
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        assert relative(layer(x), x @ layer.weight.t()) < 0.05


@pytest.mark.parametrize("before", ["nothing", "evaluation"])
def test_a_checkpoint_of_a_layer_that_has_not_trained_loses_no_gradient(before):
    """Its gradient's scale is the 1 it began with, under which gradients of 1e-6 and less vanish."""
    layer = Linear(64, 64, bias=False, precision="fp8_delayed")
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    if before == "evaluation":
        with torch.no_grad():
            layer(x)
    loaded = Linear(64, 64, bias=False, precision="fp8_delayed")
    loaded.load_state_dict(layer.state_dict())
    (loaded(x) * 1e-6).sum().backward()
    assert relative(x.grad, 1e-6 * layer.weight.sum(0).expand(16, 64)) < 0.05


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_another_dtype_leaves_the_numbers_in_float32(assign):
    layer = Linear(64, 64, precision="fp8_delayed")
    layer(torch.ones(16, 64)).sum().backward()
    loaded = Linear(64, 64, precision="fp8_delayed", dtype=torch.bfloat16)
    loaded.load_state_dict({name: value.bfloat16() for name, value in layer.state_dict().items()}, assign=assign)
    assert all(number.dtype == torch.float32 for number in loaded.state.delayed.state_dict().values())
    loaded(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()


def test_the_state_dict_of_a_layer_may_be_loaded_into_it():
    """torch.distributed.checkpoint reads into the tensors of a state dict and then loads it."""
    layer = Linear(64, 64, precision="fp8_delayed", history_len=4)
    layer(torch.ones(16, 64)).sum().backward()
    advance_scaling(layer)
    before = {name: number.clone() for name, number in layer.state_dict().items()}
    layer.load_state_dict(layer.state_dict())
    assert before["state.delayed.history"].any()
    assert all(torch.equal(number, before[name]) for name, number in layer.state_dict().items())


def test_scales_of_a_frozen_layer_follow_its_inputs():
    """Under adapters the first layers need no gradient at all, and what reaches them moves all the same."""
    frozen = torch.nn.Sequential(*(Linear(64, 64, bias=False, precision="fp8_delayed") for _ in range(2))).requires_grad_(False)
    adapter = torch.nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([adapter], lr=0.1)
    for size in (1.0, 50.0, 50.0, 50.0):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * size
        y = frozen(x)
        (y + adapter).sum().backward()
        optimizer.step()
    assert relative(y, x @ frozen[0].weight.t() @ frozen[1].weight.t()) < 0.1


def test_a_state_of_another_shape_is_refused_by_name():
    layer = Linear(16, 16, precision="fp8_delayed")
    state = layer.state_dict() | {"state.delayed.scale": torch.ones(4)}
    with pytest.raises(RuntimeError, match=r"state\.delayed\.scale has shape \(4,\), \(3,\) is needed"):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected.*state.delayed.scael"):
        layer.load_state_dict(layer.state_dict() | {"state.delayed.scael": torch.ones(3)})
