"""What the GPU benchmarks share: a Hopper device, the exported functions with fresh outputs, errors on sampled rows."""

from __future__ import annotations

import numpy as np
import torch

from te_plugin import ffi, numerics
from te_plugin.config import ConfigError
from te_plugin.numerics import GRANULARITY_CODE
from te_plugin.torch.quantize import allocated, scale_spec


def device() -> torch.device:
    """The CUDA device; ConfigError where the sm90 kernels cannot run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ConfigError("this benchmark needs a Hopper GPU (compute capability 9.0), and none is visible")
    if not ffi.is_built("sm90"):
        raise ConfigError("this benchmark needs the sm90 library: make sm90")
    return torch.device("cuda", torch.cuda.current_device())


def function(name: str):
    return ffi.function("sm90", name)


def scales(granularity: str, rows: int, cols: int) -> torch.Tensor:
    """Room for the scale_inv of a granularity, as torch's layers have it."""
    return allocated([scale_spec(rows, cols, granularity)], torch.device("cuda"))[0]


def quantize(
    x: torch.Tensor, granularity: str, fmt: numerics.Fp8Format = numerics.E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """x[R,C] -> (codes as float8, scale_inv)."""
    data = torch.empty(x.shape, dtype=getattr(torch, fmt.torch_dtype), device=x.device)
    inverse, stats = scales(granularity, *x.shape), torch.empty(2, device=x.device)
    function("quantize")(x, data, inverse, stats, GRANULARITY_CODE[granularity], fmt.code, 0)
    return data, inverse


def dequantize(
    data: torch.Tensor, inverse: torch.Tensor, granularity: str, fmt: numerics.Fp8Format = numerics.E4M3
) -> torch.Tensor:
    """FP32 values, exact products of code and scale."""
    y = torch.empty(data.shape, device=data.device)
    function("dequantize")(data, inverse, y, GRANULARITY_CODE[granularity], fmt.code)
    return y


def copy_of(nbytes: int):
    """A call that copies on the device; what it reads and writes are so many bytes together."""
    source, target = (torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: target.copy_(source)


def sampled_rows(rows: int, count: int = 32) -> torch.Tensor:
    """Row numbers on which a large result is compared with float64."""
    chosen = np.random.default_rng(0).choice(rows, min(rows, count), replace=False)
    return torch.from_numpy(np.sort(chosen)).cuda()


class Turns:
    """Calls a function with the next of several input sets at each call, so that no call finds its inputs in L2."""

    def __init__(self, call, *sets):
        self.call, self.sets, self.at = call, sets, 0

    def __call__(self):
        self.at = (self.at + 1) % len(self.sets)
        return self.call(*self.sets[self.at])
