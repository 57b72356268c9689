"""All weights of a model quantised together (quantize_many) beside the loop over them, rows + transposed, through torch.

The rate counts ideal bytes: every weight read once, both copies written once. Kernels are named with the launches of one call.
"""

from __future__ import annotations

import functools

import torch

from te_plugin.bench import cuda
from te_plugin.bench.harness import Row, interleaved, relative_error
from te_plugin.torch import quantize_many

MODELS = {
    "2 llama3.1-8B layers": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] * 2,
    "32 layers of hidden 576": [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 32,
}


def together(kind: str, seconds: float) -> list[Row]:
    """Rows of both models in one granularity ("delayed": a given scale a tensor)."""
    granularity = "tensor" if kind == "delayed" else kind
    rows = []
    for model, shapes in MODELS.items():
        weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        scales = [torch.full((1,), 80.0, device="cuda") for _ in weights] if kind == "delayed" else None
        cast = functools.partial(quantize_many, weights, "e4m3", granularity, scales=scales, transpose=True)
        calls = {name: functools.partial(cast, kernel=name) for name in ("sm90", "separate")}
        timings = interleaved(calls, seconds, device="cuda")
        nbytes = 4 * sum(weight.numel() for weight in weights)
        for name, call in calls.items():
            first, took = call()[0], timings[name]
            y = cuda.dequantize(first.data, first.scale_inv, granularity)[:64]
            rows.append(
                Row(
                    "quantize_many + transposed",
                    f"{kind} {model}",
                    f"{name} ({launches_of(call)} launches)",
                    True,
                    took.median * 1e3,
                    took.low * 1e3,
                    took.high * 1e3,
                    nbytes / took.median / 1e12,
                    "TB/s",
                    relative_error(y, weights[0][:64].double().cpu().numpy()),
                    turns=took.turns,
                )
            )
    return rows


def launches_of(call) -> int:
    """Kernels and memory operations that a call starts on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
