"""What each process of test_ddp_scales.py runs: a layer with delayed scaling under DistributedDataParallel as torch makes it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import te_plugin.torch as tp


def steps(factor: float) -> tuple[list[float], list[float]]:
    """(gradient norms, relative errors of y) of three steps. Rank 0 has no loss in the first, the others' x is `factor` times
    its."""
    torch.manual_seed(0)
    layer = tp.Linear(64, 64, bias=False, precision="fp8_delayed")
    model, rank = DistributedDataParallel(layer), dist.get_rank()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.randn(16, 64) * (factor if rank else 1.0)
    exact = x @ layer.weight.detach().t()
    norms, errors = [], []
    for step in range(3):
        y = model(x)
        errors.append(float((y - exact).norm() / exact.norm()))
        (y.mean() * (0.0 if rank == step == 0 else 1e-7)).backward()
        norms.append(float(layer.weight.grad.norm()))
        optimizer.step()
        optimizer.zero_grad()
    return norms, errors
