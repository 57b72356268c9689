"""Calls into the sm90 library with torch tensors, for the tests: outputs are allocated here and poisoned first."""

from __future__ import annotations

import numpy as np

from te_plugin import ffi, numerics

from . import reference

try:
    import torch
except ImportError:  # the machine that checks the SASS needs no torch
    torch = None


def reason_to_skip() -> str | None:
    if torch is None:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the device is not Hopper (compute capability 9.0)"
    return None


def call(name: str, *args) -> None:
    """Waits for the kernel where that is allowed: a fault shows at its own call, and the arguments live until they are read."""
    ffi.function("sm90", name)(*args)
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


def kernels_of(run) -> list[str]:
    """Names of the kernels that a call launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def cuda(array: np.ndarray, dtype=None):
    t = torch.from_numpy(np.ascontiguousarray(array)).cuda()
    return t if dtype is None else t.to(dtype)


def poisoned(shape, dtype):
    t = torch.empty(shape, dtype=dtype, device="cuda")
    return t.fill_(0xA5 if dtype == torch.uint8 else float("nan"))


def scale_buffer(granularity: str, rows: int, cols: int, by_block: bool = False):
    """by_block: scales of 1x128 blocks lie block after block instead of row after row."""
    shape = reference.scale_shape(granularity, rows, cols)
    made = poisoned(shape[::-1] if by_block else shape, torch.uint8 if granularity == "mx" else torch.float32)
    return made.t() if by_block else made


def quantize(
    x, granularity: str, fmt=numerics.E4M3, pow2: bool = False, transpose: bool = False, used=None, by_block: bool = False
):
    """Returns a dict of NumPy arrays: data, scale_inv, stats and, with transpose, data_t, scale_inv_t. used: int64[1]."""
    rows, cols = x.shape
    out = {"data": poisoned((rows, cols), torch.uint8), "scale_inv": scale_buffer(granularity, rows, cols, by_block)}
    if transpose:
        out |= {
            "data_t": poisoned((cols, rows), torch.uint8),
            "scale_inv_t": scale_buffer(granularity, cols, rows, by_block),
        }
    out["stats"] = poisoned((2,), torch.float32)
    name = f"quantize{'' if used is None else '_used'}{'_transpose' if transpose else ''}"
    given = [x] if used is None else [x, used]
    call(name, *given, *out.values(), numerics.GRANULARITY_CODE[granularity], fmt.code, int(pow2))
    return {k: v.cpu().numpy() for k, v in out.items()}


def quantized(x: np.ndarray, granularity: str, fmt=numerics.E4M3):
    """(codes, scale_inv) on the device and the float64 values they stand for, made by the reference."""
    codes, scale_inv = reference.quantize(x.astype(np.float32), granularity, fmt)
    return cuda(codes), cuda(scale_inv), reference.dequantize(codes, scale_inv, granularity, fmt)
