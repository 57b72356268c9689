"""Where the time of a call goes, kernel by kernel, from torch.profiler.

On a GPU the rows are its kernels. On the CPU they are torch's operators by their own time, and a kernel of our library counts to
the operator that called it (usually "other"): there the breakdown shows that it works, and little more.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
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
    differ from theirs by what the clock does. A call more runs before those that count: in it the GPU still waits for the host,
    which layers in a row do not.
    """
    if device.type != "cuda":
        return _of_cpu(call, calls)
    _keep_busy(call, device, warm_ms)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls + 1):
            call()
        torch.cuda.synchronize(device)
    return of_events(((e.name, e.time_range.start, e.time_range.end) for e in found.events()
                      if e.device_type == torch.autograd.DeviceType.CUDA and not getattr(e, "is_user_annotation", False)), calls)


def of_events(events: Iterable[tuple[str, float, float]], calls: int) -> Breakdown:
    """Of (name, start, end) in microseconds of all that ran on a GPU in one call more than `calls`: the first is left out."""
    events = sorted(events, key=lambda event: event[1])
    events = events[len(events) // (calls + 1):]
    took, launches = Counter(), Counter()
    for name, start, end in events:
        took[name] += end - start
        launches[name] += 1
    kernels = [Kernel(name, group_of(name), us / 1e3 / calls, launches[name] / calls) for name, us in took.items() if us > 0]
    span = (max(end for _, _, end in events) - events[0][1]) / 1e3 / calls if events else 0.0
    return _breakdown(kernels, span)


def _of_cpu(call: Callable[[], object], calls: int) -> Breakdown:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(calls):
            call()
    kernels = [Kernel(event.key, group_of(event.key), event.self_cpu_time_total / 1e3 / calls, event.count / calls)
               for event in found.key_averages()
               if event.device_type == torch.autograd.DeviceType.CPU and event.self_cpu_time_total > 0]
    ranges = [event.time_range for event in found.events() if event.device_type == torch.autograd.DeviceType.CPU]
    return _breakdown(kernels, (max(r.end for r in ranges) - min(r.start for r in ranges)) / 1e3 / calls)


def _breakdown(kernels: list[Kernel], span: float) -> Breakdown:
    """span: milliseconds of a call from its first kernel to its last."""
    groups = {name: sum(kernel.ms for kernel in kernels if kernel.group == name) for name in GROUPS}
    groups["gaps"] = max(span - sum(groups.values()), 0.0)
    return Breakdown(groups, tuple(sorted(kernels, key=lambda kernel: -kernel.ms)))


def _keep_busy(call: Callable[[], object], device: torch.device, ms: float) -> None:
    start = time.perf_counter()
    while (time.perf_counter() - start) * 1e3 < ms:
        call()
    torch.cuda.synchronize(device)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
