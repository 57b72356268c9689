"""refresh_weights fills the caches that the layers' forward would have filled: same bits, same state, no cast left to do."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import te_plugin.torch as tp
from te_plugin.torch import launches
from te_plugin.torch.state import states

DENSE = ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8"]


class Net(torch.nn.Module):
    """Every kind of layer; the experts have no delayed scaling. `skip` leaves out the last linear layer in some steps."""

    def __init__(self, precision: str, **options):
        super().__init__()
        torch.manual_seed(0)
        self.norm_linear = tp.LayerNormLinear(128, 256, precision=precision, **options)
        self.linear = tp.Linear(256, 128, precision=precision, **options)
        self.mlp = tp.LayerNormMLP(128, 256, precision=precision, **options)
        experts = "fp8_current" if precision == "fp8_delayed" else precision
        self.experts = tp.GroupedLinear(4, 128, 128, precision=experts)
        self.bf16 = tp.Linear(128, 128)
        self.last = tp.Linear(128, 128, precision=precision, **options)

    def forward(self, x, skip: bool = False):
        x = self.mlp(self.linear(self.norm_linear(x)))
        x = self.bf16(self.experts(x, torch.tensor([40, 0, 70, 18])))
        return x if skip else self.last(x)


def train(net: Net, refresh: bool, steps: int = 4, ends_steps: bool = True, microbatches: int = 2, around=None) -> list:
    """Losses and gradients of some steps, and what the layers' states hold at their end."""
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.05), []
    around = (lambda f, x, skip: f(x, skip)) if around is None else around
    for step in range(steps):
        if refresh:
            tp.refresh_weights(net)
        for part in range(microbatches):
            x = torch.randn(128, 128, generator=torch.Generator().manual_seed(10 * step + part)).requires_grad_()
            loss = around(net, x, step == 2).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if ends_steps:
            tp.advance_scaling(net)
    return [*found, *net.state_dict().values(), *(s.last_stats[key] for _, s in states(net) for key in sorted(s.last_stats))]


def check_same(got: list, want: list) -> None:
    assert len(got) == len(want)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"value {number} differs"


@pytest.mark.parametrize("ends_steps", [True, False], ids=["advance_scaling", "weight changes"])
@pytest.mark.parametrize("options", [{}, {"keep_transpose": False}], ids=str)
@pytest.mark.parametrize("precision", DENSE)
def test_training_has_the_bits_and_the_state_of_the_lazy_way(precision, options, ends_steps):
    nets = [Net(precision, **options) for _ in range(2)]
    runs = [train(net, refresh, ends_steps=ends_steps) for net, refresh in zip(nets, (True, False), strict=True)]
    check_same(*runs)
    casts = [[state.weight_casts for _, state in states(net)] for net in nets]
    assert casts[0] == [4] * 6 and casts[1] == [4] * 5 + [3]  # the layer that did not run in one step


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_has_the_bits_of_the_lazy_way(reentrant):
    around = lambda net, x, skip: checkpoint(net, x, skip, use_reentrant=reentrant)  # noqa: E731
    check_same(*[train(Net("fp8_delayed"), refresh, around=around) for refresh in (True, False)])


def test_the_forward_after_it_casts_no_weight_and_launches_stay_constant():
    counts = []
    for layers in (1, 5):
        net = torch.nn.Sequential(*[tp.LayerNormMLP(128, 128, precision="fp8_block") for _ in range(layers)])
        net(torch.ones(16, 128)).sum().backward()
        tp.advance_scaling(net)
        launches.reset()
        report = tp.refresh_weights(net)
        assert len(report.quantised) == 2 * layers and not report.left
        before = [state.weight_casts for _, state in states(net)]
        counts.append([sum(row["launches"].values()) for row in launches.snapshot() if row["op"] == "quantize_many"])
        net(torch.ones(16, 128)).sum().backward()
        assert [state.weight_casts for _, state in states(net)] == before == [2] * 2 * layers
        assert tp.refresh_weights(net).quantised == ()
    assert counts == [[1], [1]]


def test_an_evaluation_between_steps_changes_nothing():
    def evaluated(net, x, skip):
        with torch.no_grad():
            net(x)
        return net(x, skip)

    check_same(*[train(Net("fp8_delayed"), refresh, around=evaluated) for refresh in (True, False)])


@pytest.mark.parametrize("change", ["in place", "load_state_dict"])
def test_a_weight_that_changes_afterwards_is_quantised_again(change):
    results = []
    for refresh in (True, False):
        torch.manual_seed(0)
        layer, x = tp.Linear(64, 64, bias=False, precision="fp8_delayed"), torch.ones(16, 64)
        layer(x).sum().backward()
        tp.advance_scaling(layer)
        if refresh:
            assert tp.refresh_weights(layer).quantised == ("",)
        if change == "in place":
            with torch.no_grad():
                layer.weight.mul_(2)
        else:
            layer.load_state_dict({"weight": layer.weight.detach() * 2}, strict=False)
            assert "has not trained yet" in tp.refresh_weights(layer).left[""]  # its scale must be found anew
        results.append([layer(x), *layer.state_dict().values()])
    check_same(*results)


def test_called_in_inference_mode_it_serves_training_all_the_same():
    layer = tp.LayerNormMLP(64, 64, precision="fp8_current")
    layer(torch.ones(16, 64)).sum().backward()
    tp.advance_scaling(layer)
    with torch.inference_mode():
        assert len(tp.refresh_weights(layer).quantised) == 2
    layer(torch.ones(16, 64, requires_grad=True)).sum().backward()
    assert [state.weight_casts for _, state in states(layer)] == [2, 2]


def test_what_is_left_to_the_forward_is_named():
    uncached = tp.Linear(64, 64, precision="fp8_current", weight_cache=False)
    net = torch.nn.Sequential(tp.Linear(64, 64, precision="fp8_current"), uncached, tp.Linear(64, 64))
    report = tp.refresh_weights(net)
    assert report.quantised == () and list(report.left) == ["0", "1"]
    assert "has not trained yet" in report.left["0"] and "weight_cache=False" in report.left["1"]
    net(torch.ones(16, 64)).sum().backward()
    tp.advance_scaling(net)
    assert list(tp.refresh_weights([uncached, tp.Linear(64, 64), tp.LayerNormMLP(128, 128, precision="fp8_block")]).left) == [
        "0", "2.fc1", "2.fc2"]
    assert tp.refresh_weights(iter(net)).quantised == ("0",)


def test_sharded_weights_are_left_to_the_forward():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        nets = [Net("fp8_delayed", keep_transpose=False) for _ in range(2)]
        for net in nets:
            for layer in (net.linear, net.last):
                fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        numbers = [[x.full_tensor() if hasattr(x, "placements") else x for x in train(net, refresh)]
                   for net, refresh in zip(nets, (True, False), strict=True)]  # fmt: skip
        check_same(*numbers)
        report = tp.refresh_weights(nets[0])
        assert sorted(report.left) == ["last", "linear"] and all("sharded" in reason for reason in report.left.values())
    finally:
        if started:
            dist.destroy_process_group()
