"""Where the time of a call goes, kernel by kernel, from torch.profiler.

On a GPU the rows are its kernels. On the CPU they are torch's operators by their own time, and a kernel of our library counts to
the operator that called it (usually "other"): there the breakdown shows that it works, and little more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

GROUPS = ("gemm", "quantise", "norm + activation + rope", "attention", "other", "gaps")
# First match wins. Kernels that norm or activate and quantise in one pass count to the op, not to the quantisation.
_PATTERNS = (
    ("attention", "flash|sdpa|fmha|attention"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas|aten::(add)?(mm|bmm)|aten::_scaled_mm"),
    ("norm + activation + rope",
     "NormSource|norm_cast|te::rows_kernel|Swiglu|rms_?norm|layer_?norm|rstd|silu|gated|rope|rotary|sum_partials"),
    ("quantise", "quanti[sz]e|amax|abs_max|cast_transpose|fp8|float8|_scales|zero_stats|transpose_kernel|scale_inv"),
    ("norm + activation + rope", "^triton_"),
)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call: milliseconds and launches a call."""

    name: str
    group: str
    ms: float
    launches: float


@dataclass(frozen=True)
class Breakdown:
    """groups: milliseconds of a call by GROUPS."""

    groups: dict[str, float]
    kernels: tuple[Kernel, ...]

    def as_json(self, most: int = 15) -> dict:
        """The groups, and the kernels that take longest."""
        return {"ms": {name: _digits(ms) for name, ms in self.groups.items()},
                "kernels": [{"name": k.name[:160], "group": k.group, "ms": _digits(k.ms), "launches": _digits(k.launches)}
                            for k in self.kernels[:most]]}


def group_of(name: str) -> str:
    """The group that a kernel's or operator's name belongs to."""
    return next((group for group, pattern in _PATTERNS if re.search(pattern, name, re.IGNORECASE)), "other")


def measure(call: Callable[[], object], device: torch.device, calls: int = 8, warm_ms: float = 300.0) -> Breakdown:
    """Profile calls that follow one another. "gaps": time between the first and the last kernel in which none ran.

    The GPU works for `warm_ms` first, so that its clock is that of sustained work, as in the timed turns; the sum can still
    differ from theirs by what the clock does.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        _keep_busy(call, device, warm_ms)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    kernels = []
    for event in found.key_averages():
        if event.device_type != wanted or getattr(event, "is_user_annotation", False):
            continue
        took = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if took > 0:
            kernels.append(Kernel(event.key, group_of(event.key), took / 1e3 / calls, event.count / calls))
    kernels.sort(key=lambda kernel: -kernel.ms)
    groups = {name: sum(kernel.ms for kernel in kernels if kernel.group == name) for name in GROUPS}
    ranges = [event.time_range for event in found.events() if event.device_type == wanted]
    span = (max(r.end for r in ranges) - min(r.start for r in ranges)) / 1e3 / calls
    groups["gaps"] = max(span - sum(groups.values()), 0.0)
    return Breakdown(groups, tuple(kernels))


def _keep_busy(call: Callable[[], object], device: torch.device, ms: float) -> None:
    start = time.perf_counter()
    while (time.perf_counter() - start) * 1e3 < ms:
        call()
    torch.cuda.synchronize(device)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
