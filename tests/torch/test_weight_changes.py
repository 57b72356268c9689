"""Every way in which a weight can change ends the step: the next product has the new weight, and delayed scaling moves on."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import te_plugin.torch as tp


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    if started:
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_delayed"])
def test_fsdp2_in_a_loop_of_the_users_own_never_uses_an_old_weight(precision, mesh):
    """FSDP2 gathers into the same tensor, often at the same address, and keeps its version counter."""
    from torch.distributed.fsdp import fully_shard

    layer = tp.Linear(64, 64, bias=False, precision=precision)
    state = layer.state
    fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(1, 31):
        layer(torch.ones(16, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert state.weight_casts == step


def test_delayed_scaling_moves_on_where_steps_are_announced_by_new_step():
    """Megatron's optimizers write through .data; is_first_microbatch calls new_step."""
    layer = tp.Linear(64, 64, bias=False, precision="fp8_delayed")
    scales = []
    for step in range(4):
        layer.state.new_step()
        for _ in range(2):
            layer(torch.full((16, 64), 10.0**step)).sum().backward()
        layer.weight.data.mul_(1.5)
        scales.append(layer.state.delayed.scale[0].item())
    assert scales == pytest.approx([448, 448, 44.8, 4.48])


def test_recompute_sees_the_scales_of_the_forward_it_repeats():
    """Megatron's recompute is of the reentrant kind: its first forward records no gradient."""
    layer, seen = tp.Linear(64, 64, bias=False, precision="fp8_delayed"), []

    def forward(x):
        seen.append(layer(x))
        return seen[-1]

    for step in range(1, 4):
        checkpoint(forward, torch.full((16, 64), float(step), requires_grad=True), use_reentrant=True).sum().backward()
        with torch.no_grad():
            layer.weight.mul_(1.3)
        first, again = seen[-2:]
        assert torch.equal(first, again)


@pytest.mark.report("flashinfer-ai/flashinfer#4069")
@pytest.mark.parametrize("precision", ["fp8_current", "fp8_block"])
def test_a_weight_at_the_place_of_one_that_is_gone_is_a_new_weight(precision):
    """Ids and addresses are given out again once a tensor is gone."""
    layer = tp.Linear(128, 128, bias=False, precision=precision)
    for value in range(1, 31):
        weight = torch.full((128, 128), float(value))
        y = torch.func.functional_call(layer, {"weight": weight}, (torch.ones(1, 128),))
        assert y[0, 0].item() == pytest.approx(128 * value, rel=0.05)
        del weight, y


@pytest.mark.report("flashinfer-ai/flashinfer#4069")
def test_values_swapped_in_at_the_old_address_are_seen():
    layer, x = tp.Linear(512, 512, bias=False, precision="fp8_current"), torch.ones(1, 512)
    for value in range(1, 91, 3):
        for step in range(3):  # what the second one frees, the third one may get
            layer.weight.data = torch.full((512, 512), float(value + step))
            if step != 1:
                assert layer(x)[0, 0].item() == pytest.approx(512 * (value + step), rel=0.05)


@pytest.mark.report("NVIDIA-NeMo/Automodel#3606")
def test_averaged_weights_that_are_swapped_in_for_an_evaluation_are_used():
    """torch_ema and diffusers copy through .data, which no version counter sees; train() and eval() are."""
    layer, x = tp.Linear(64, 64, bias=False, precision="fp8_current"), torch.ones(1, 64)
    mine = layer.weight.detach().clone()
    trained = layer(x)
    layer.weight.data.copy_(2 * mine)
    layer.eval()
    assert torch.equal(layer(x), 2 * trained)
    layer.train()
    layer.weight.data.copy_(mine)
    assert torch.equal(layer(x), trained)


@pytest.mark.parametrize("explicit", [False, True])
def test_scales_of_an_averaged_copy_follow_its_weights(explicit):
    """It never trains; with the scales it was copied with, weights that grew would saturate without a word."""
    layer = torch.nn.Sequential(*(tp.Linear(64, 64, bias=False, precision="fp8_delayed") for _ in range(2)))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    layer(x).sum().backward()
    if explicit:
        tp.advance_scaling(layer)
    average = copy.deepcopy(layer).eval()
    with torch.no_grad():
        for growth in [1.3] * 8 + [1.0] * 12:  # the scales are a step behind, and the average behind its model
            for mine, theirs in zip(average.parameters(), layer.parameters(), strict=True):
                mine.lerp_(theirs.mul_(growth), 0.5)
            y = average(x)
        exact = x @ average[0].weight.t() @ average[1].weight.t()
    assert (y - exact).norm() < 0.1 * exact.norm()


def test_a_copy_of_a_layer_knows_nothing_of_the_first_ones_weight():
    layer = tp.Linear(64, 64, bias=False, precision="fp8_delayed")
    layer(torch.ones(16, 64)).sum().backward()
    copied, file = copy.deepcopy(layer), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert torch.equal(other(torch.ones(16, 64)), layer(torch.ones(16, 64)))
        assert other.state.weight_casts == layer.state.weight_casts + 1


def test_a_layer_made_in_inference_mode_works():
    """Such tensors have no version counter."""
    with torch.inference_mode():
        layer = tp.Linear(64, 64, precision="fp8_delayed")
        assert torch.equal(layer(torch.ones(1, 64)), layer(torch.ones(1, 64)))


@pytest.mark.report("huggingface/diffusers#1658")
@pytest.mark.parametrize("precision", ["fp8_current", "fp8_delayed"])
def test_training_goes_on_after_an_evaluation_in_inference_mode(precision):
    """The weight that the evaluation quantised serves the training forward too, which saves it for its backward."""
    layer, x = tp.Linear(64, 64, precision=precision), torch.ones(16, 64, requires_grad=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        with torch.inference_mode():
            layer(torch.ones(16, 64))
        layer(x).sum().backward()
        optimizer.step()
    assert layer.state.weight_casts == 4  # only the first evaluation does not know which copies training needs


@pytest.mark.gpu
def test_the_numbers_of_delayed_scaling_lie_where_the_weight_is_loaded():
    layer = tp.Linear(64, 64, bias=False, precision="fp8_delayed", device="meta")
    layer.load_state_dict({"weight": torch.ones(64, 64, device="cuda")}, assign=True)
    torch.testing.assert_close(layer(torch.ones(16, 64, device="cuda")), torch.full((16, 64), 64.0, device="cuda"))
    assert all(number.is_cuda for number in layer.state.delayed.state_dict().values())


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_delayed", "fp8_rowwise"])
def test_recompute_casts_a_weight_once_a_step(precision):
    """The first forward of the reentrant kind needs no transposed copy, its repetition does; it is known from the step before."""
    layer, casts = tp.LayerNormLinear(64, 64, precision=precision), []
    for _ in range(3):
        before = layer.state.weight_casts
        for _ in range(2):
            checkpoint(layer, torch.ones(16, 64, requires_grad=True), use_reentrant=True).sum().backward()
        casts.append(layer.state.weight_casts - before)
        tp.advance_scaling(layer)
    assert casts == [2, 1, 1]
    layer.eval()
    with torch.no_grad():
        layer(torch.ones(16, 64))
    assert layer.state._cached.data_t is None
