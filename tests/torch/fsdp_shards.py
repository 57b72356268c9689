"""What each process of test_fsdp_shards.py runs: a small FP8 model, whole or sharded by FSDP2."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_plugin.torch as tp

STEPS = 3


def model(precision: str) -> torch.nn.Module:
    """The second layer has 4 rows: over 3 ranks it is cut 2, 2, 0; the first has 32: 11, 11, 10."""
    torch.manual_seed(0)
    return torch.nn.Sequential(tp.Linear(32, 32, precision=precision), tp.Linear(32, 4, precision="bf16"))


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def train(net: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = net(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tp.advance_scaling(net)
        losses.append(loss.item())
    return losses


def sharded(precision: str) -> tuple[list[float], list[list[int]], list]:
    """(losses, rows of each local shard, gathered parameters) of this rank."""
    net = model(precision)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    rows = [[p.to_local().shape[0] for p in layer.parameters()] for layer in net]
    losses = train(net)
    return losses, rows, [p.full_tensor().detach().numpy() for p in net.parameters()]
