"""Tiny correctness checks of what is installed here, each against the float64 oracle: what `te-plugin doctor` runs.

The raw checks call the functions of a compiled library on NumPy arrays and need no framework; the torch checks go through the
public functions of te_plugin.torch on every device that torch has, the JAX checks through those of te_plugin.jax.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from te_plugin import ffi, numerics, oracle
from te_plugin.oracle.metrics import compare


@dataclass(frozen=True)
class Outcome:
    """error: the largest relative error of the outputs; bound: what it may be; problem: why the check could not run."""

    backend: str
    check: str
    error: float | None
    bound: float
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None and self.error is not None and self.error <= self.bound


# A check gives (output, reference) pairs.
Pairs = Iterator[tuple[np.ndarray, np.ndarray]]

_CU = np.array([0, 5, 5, 12, 20], dtype=np.int32)  # one empty segment
_ROWS, _HEADS, _KV_HEADS, _DIM = 20, 4, 2, 16


def run_all() -> Iterator[Outcome]:
    """Every check that this installation can run."""
    if ffi.is_built("cpu"):
        for name, (check, bound) in RAW_CHECKS.items():
            yield _outcome("cpu library", name, check, bound)
    if importlib.util.find_spec("torch") is not None:
        import torch

        devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
        for device in devices:
            for name, (check, bound) in TORCH_CHECKS.items():
                yield _outcome(f"torch {device}", name, lambda check=check, device=device: check(device), bound)
    if all(importlib.util.find_spec(package) is not None for package in ("jax", "jax_tvm_ffi")):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # tiny inputs need no share of the GPU's memory
        import jax

        for name, (check, bound) in JAX_CHECKS.items():
            yield _outcome(f"jax {jax.default_backend()}", name, check, bound)


def _outcome(backend: str, name: str, check: Callable[[], Pairs], bound: float) -> Outcome:
    try:
        errors = [compare(got, want).relative for got, want in check()]
    except Exception as error:  # a doctor reports every ailment, also one that nobody foresaw
        return Outcome(backend, name, None, bound, f"{type(error).__name__}: {error}")
    return Outcome(backend, name, max(errors), bound)


def _random(*shape: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def _qkv() -> tuple[np.ndarray, ...]:
    return (_random(_ROWS, _HEADS, _DIM), _random(_ROWS, _KV_HEADS, _DIM, seed=8), _random(_ROWS, _KV_HEADS, _DIM, seed=9),
            _random(_ROWS, _HEADS, _DIM, seed=10))


# ---- the compiled library on NumPy arrays ----

def _call(name: str, *arguments) -> None:
    ffi.function("cpu", name)(*arguments)


def _nan(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, dtype=np.float32)


def _raw_attention() -> Pairs:
    q, k, v, dout = _qkv()
    out, lse, scale = _nan(*q.shape), _nan(_HEADS, _ROWS), _DIM ** -0.5
    segments = (_CU, _CU, _CU, _CU)
    _call("attention_forward", q, k, v, *segments, out, lse, 1, -1, -1, scale)
    want, want_lse = oracle.attention_forward(q, k, v, _CU)
    yield out, want
    yield lse, want_lse
    dq, dk, dv = _nan(*q.shape), _nan(*k.shape), _nan(*v.shape)
    scratch = np.zeros((1, _HEADS, _ROWS, _DIM), dtype=np.float32)
    _call("attention_backward", dout, q, k, v, out, lse, *segments, dq, dk, dv, scratch, 1, -1, -1, scale, 0)
    yield from zip((dq, dk, dv), oracle.attention_backward(dout, q, k, v, _CU), strict=True)


def _raw_quantize() -> Pairs:
    x = _random(40, 200)
    for granularity, code in numerics.GRANULARITY_CODE.items():
        want, want_t = oracle.quantize_transpose(x, numerics.E4M3, granularity)
        data, data_t = np.zeros((40, 200), np.uint8), np.zeros((200, 40), np.uint8)
        scale, scale_t = np.zeros_like(want.scale_inv).reshape(-1), np.zeros_like(want_t.scale_inv).reshape(-1)
        scale, scale_t = scale.reshape(want.scale_inv.shape or (1,)), scale_t.reshape(want_t.scale_inv.shape or (1,))
        stats = _nan(2)
        _call("quantize_transpose", x, data, scale, data_t, scale_t, stats, code, numerics.E4M3.code, 0)
        yield data, want.data
        yield data_t, want_t.data
        yield scale.reshape(-1), want.scale_inv.reshape(-1)
        yield stats, np.array([np.abs(x).max(), 0.0])


def _raw_norm() -> Pairs:
    x, weight, dy = _random(9, 64), _random(64), _random(9, 64, seed=11)
    y, rstd, dx, dw = _nan(9, 64), _nan(9), _nan(9, 64), _nan(64)
    _call("rms_norm_forward", x, weight, y, rstd, 1e-5)
    _call("rms_norm_backward", dy, x, weight, rstd, dx, dw)
    yield y, oracle.rms_norm_forward(x, weight, 1e-5)[0]
    want_dx, want_dw = oracle.rms_norm_backward(dy, x, weight, 1e-5)
    yield from zip((dx, dw), (want_dx, want_dw), strict=True)
    residual, h, y, dx = _random(9, 64, seed=12), _nan(9, 64), _nan(9, 64), _nan(9, 64)
    _call("rms_norm_residual_forward", x - residual, residual, weight, y, h, rstd, 1e-5)
    _call("rms_norm_residual_backward", dy, residual, x, weight, rstd, dx, dw)
    yield from zip((h, y, dx), (x, oracle.rms_norm_forward(x, weight, 1e-5)[0], want_dx + residual), strict=True)


def _raw_swiglu() -> Pairs:
    x, dy = _random(9, 64), _random(9, 32)
    y, dx = _nan(9, 32), _nan(9, 64)
    _call("swiglu_forward", x, y)
    _call("swiglu_backward", dy, x, dx)
    yield y, oracle.swiglu_forward(x)
    yield dx, oracle.swiglu_backward(dy, x)


def _raw_rope() -> Pairs:
    x, y = _random(_ROWS, _HEADS, _DIM), _nan(_ROWS, _HEADS, _DIM)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in np.diff(_CU)])
    inv_freq = (10000.0 ** -(np.arange(0, _DIM, 2) / _DIM)).astype(np.float32)
    _call("rope", x, positions, inv_freq, y, 0)
    yield y, oracle.rope(x, positions, inv_freq)


def _raw_loss() -> Pairs:
    logits, dloss = _random(9, 50), _random(9)
    labels = np.array([3, -100, 0, 49, 7, 7, -100, 12, 1], dtype=np.int32)
    loss, lse, dlogits = _nan(9), _nan(9), _nan(9, 50)
    _call("cross_entropy_forward", logits, labels, loss, lse)
    _call("cross_entropy_backward", dloss, logits, labels, lse, dlogits)
    yield loss, oracle.cross_entropy_forward(logits, labels)[0]
    yield dlogits, oracle.cross_entropy_backward(dloss, logits, labels)


def _raw_grouped() -> Pairs:
    a, b, sizes = _random(11, 16), _random(3, 8, 16), np.array([4, 0, 5], dtype=np.int32)
    y, dw = _nan(11, 8), _nan(3, 8, 16)
    _call("grouped_gemm", a, b, sizes, y)
    yield y, oracle.grouped_gemm(a, b, sizes)
    dy = _random(11, 8)
    _call("grouped_gemm_wgrad", dy, a, sizes, dw, 0)
    yield dw, oracle.grouped_gemm_wgrad(dy, a, sizes)


RAW_CHECKS: dict[str, tuple[Callable[[], Pairs], float]] = {
    "attention, forward and backward": (_raw_attention, 1e-5),
    "quantise, every granularity, bit for bit": (_raw_quantize, 0.0),
    "RMSNorm": (_raw_norm, 1e-5),
    "SwiGLU": (_raw_swiglu, 1e-5),
    "RoPE": (_raw_rope, 1e-5),
    "cross-entropy": (_raw_loss, 1e-5),
    "grouped GEMM": (_raw_grouped, 1e-5),
}


# ---- te_plugin.torch ----

def _to(device: str, *arrays: np.ndarray):
    import torch

    return [torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in arrays]


def _numpy(x) -> np.ndarray:
    return x.detach().float().cpu().numpy()


def _torch_attention(device: str) -> Pairs:
    from te_plugin.torch import functional

    q, k, v, dout = _qkv()
    tensors = [x.bfloat16().requires_grad_() for x in _to(device, q, k, v)]
    rounded = [_numpy(x) for x in tensors]
    out = functional.attention(*tensors, cu_seqlens_q=_to(device, _CU)[0])
    yield _numpy(out), oracle.attention_forward(*rounded, _CU)[0]
    grad = _to(device, dout)[0].bfloat16()
    out.backward(grad)
    yield from zip([_numpy(x.grad) for x in tensors], oracle.attention_backward(_numpy(grad), *rounded, _CU), strict=True)


def _torch_linear(device: str, precision: str) -> Pairs:
    from te_plugin.torch import functional

    x, weight = (t.bfloat16().requires_grad_() for t in _to(device, _random(24, 128), _random(256, 128)))
    y = functional.linear(x, weight, precision=precision)
    yield _numpy(y), oracle.linear(_numpy(x), _numpy(weight), precision=precision)


def _torch_pointwise(device: str) -> Pairs:
    from te_plugin.torch import functional

    x, weight = _to(device, _random(9, 64), _random(64))
    yield _numpy(functional.rms_norm(x, weight)), oracle.rms_norm_forward(_numpy(x), _numpy(weight))[0]
    yield _numpy(functional.swiglu(x)), oracle.swiglu_forward(_numpy(x))


TORCH_CHECKS: dict[str, tuple[Callable[[str], Pairs], float]] = {
    "attention, BF16": (_torch_attention, 1e-2),
    "linear, bf16": (lambda device: _torch_linear(device, "bf16"), 5e-3),
    "linear, fp8_current": (lambda device: _torch_linear(device, "fp8_current"), 5e-3),
    "linear, fp8_block": (lambda device: _torch_linear(device, "fp8_block"), 5e-3),
    "RMSNorm and SwiGLU": (_torch_pointwise, 1e-5),
}


# ---- te_plugin.jax ----

def _jax_attention() -> Pairs:
    import jax
    import jax.numpy as jnp

    from te_plugin.jax import functional

    single = lambda x: np.asarray(x.astype(jnp.float32))  # noqa: E731
    q, k, v, dout = (jnp.asarray(x).astype(jnp.bfloat16) for x in _qkv())
    out, pullback = jax.vjp(lambda q, k, v: functional.attention(q, k, v, cu_seqlens_q=jnp.asarray(_CU)), q, k, v)
    yield single(out), oracle.attention_forward(*map(single, (q, k, v)), _CU)[0]
    yield from zip(map(single, pullback(dout)), oracle.attention_backward(*map(single, (dout, q, k, v)), _CU), strict=True)


def _jax_linear() -> Pairs:
    import jax.numpy as jnp

    from te_plugin.jax import functional

    x, weight = (jnp.asarray(a).astype(jnp.bfloat16) for a in (_random(24, 128), _random(256, 128)))
    y = functional.linear(x, weight, precision="fp8_current")
    rounded = [np.asarray(a.astype(jnp.float32)) for a in (x, weight)]
    yield y.astype(jnp.float32), oracle.linear(*rounded, precision="fp8_current")


JAX_CHECKS: dict[str, tuple[Callable[[], Pairs], float]] = {
    "attention, BF16": (_jax_attention, 1e-2),  # FP32 has no kernel on a GPU
    "linear, fp8_current": (_jax_linear, 5e-3),
}
