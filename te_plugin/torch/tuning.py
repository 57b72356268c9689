"""Measures the kernels of a matrix product on this GPU, for kernel="auto" (te_plugin/tuning.py says how choices are kept).

    with tuned(): ...        or        enable() and disable()

Off unless asked for: without it the choice is the order of the kernels, the same on every machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from te_plugin import ffi, numerics
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import Plan, set_tuner
from te_plugin.torch import gemm
from te_plugin.torch.call import TORCH_DTYPE
from te_plugin.torch.quantize import QuantizeOptions, quantize_2d
from te_plugin.tuning import Store, Tuner, cache_path

DRIVER_VERSION_FILE = Path("/sys/module/nvidia/version")
ROUNDS = 15
WARM_UP = 3
FLUSH_BYTES = 256 << 20  # more than any L2: operands of a training step do not lie there


def gpu_name(device: int | None = None) -> str:
    return torch.cuda.get_device_name(device)


def made_with() -> dict[str, str]:
    """What a measurement depends on besides the GPU; a file made with something else is not used."""
    library = ffi.library_path("sm90")
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:16] if library.is_file() else "not built"
    return {"gpu": gpu_name(), "sm90 library": digest, "torch": torch.__version__, "cuda": str(torch.version.cuda),
            "driver": driver_version()}


def driver_version() -> str:
    """The NVIDIA driver's own version, or (where the system hides it) the CUDA version that it supports."""
    with contextlib.suppress(OSError):
        return DRIVER_VERSION_FILE.read_text(encoding="ascii").strip()
    version = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if status != 0:
        raise RuntimeError(f"the CUDA driver does not say its version (cuDriverGetVersion returned {status})")
    return f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def make_tuner() -> Tuner:
    """A tuner for this machine's GPU and its file."""
    return Tuner(measure, Store(cache_path(gpu_name()), made_with()), "torch", cannot_measure)


def enable() -> Tuner:
    """Measure from now on. RuntimeError where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("kernels are measured on a GPU, and torch sees none; leave run.tune off")
    tuner = make_tuner()
    set_tuner(tuner)
    return tuner


def disable() -> None:
    set_tuner(None)


@contextlib.contextmanager
def tuned() -> Iterator[Tuner]:
    try:
        yield enable()
    finally:
        disable()


def cannot_measure() -> str | None:
    """Why a measurement cannot be made at this moment."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


def measure(problem: GemmProblem, plans: tuple[Plan, ...]) -> dict[str, float]:
    """Median seconds of each plan's kernel on random operands of the problem, in turns, with a cold L2."""
    calls = {plan.kernel.name: _call(problem, plan) for plan in plans}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + ROUNDS):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= WARM_UP:
                times[name].append(start.elapsed_time(end) * 1e-3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _call(problem: GemmProblem, plan: Plan):
    a = _operand(problem.m, problem.k, problem.dtype_a, problem.scale_a, 1)
    b = _operand(problem.n, problem.k, problem.dtype_b, problem.scale_b, 2)
    out_dtype = TORCH_DTYPE[problem.out_dtype]
    key = gemm.GemmOptions(problem.dtype_a, problem.scale_a, problem.dtype_b, problem.scale_b, plan.kernel.name,
                           accumulation=problem.accumulation).key()
    if problem.accumulate:
        out = torch.zeros((problem.m, problem.n), dtype=out_dtype, device="cuda")
        return lambda: gemm.run_scaled(plan, *a, *b, key, out_dtype, out)
    return lambda: gemm.run_scaled(plan, *a, *b, key, out_dtype, None)


def _operand(rows: int, columns: int, dtype: str, granularity: str, seed: int):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn((rows, columns), generator=generator, device="cuda", dtype=torch.bfloat16)
    made = quantize_2d(x, QuantizeOptions(numerics.FORMATS[dtype].name, granularity))
    return made.data, made.scale_inv
