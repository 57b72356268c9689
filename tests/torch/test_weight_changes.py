"""Every way in which a weight can change ends the step: the next product has the new weight, and delayed scaling moves on."""

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
