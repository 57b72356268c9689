"""RMSNorm, SwiGLU, RoPE and cross-entropy in float64, with their gradients.

Shapes: R rows, C columns, T tokens, H heads, G kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np

IGNORE = -100


def rms_norm_forward(x, weight, eps: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """x[R,C], weight[C] -> y[R,C] = x * rstd * weight and rstd[R] = 1/sqrt(mean(x^2) + eps)."""
    x, weight = _f64(x), _f64(weight)
    rstd = 1 / np.sqrt(np.mean(x * x, axis=1) + eps)
    return x * rstd[:, None] * weight, rstd


def rms_norm_backward(dy, x, weight, eps: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """dy[R,C] -> dx[R,C], dw[C]."""
    dy, x, weight = _f64(dy), _f64(x), _f64(weight)
    rstd = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)
    normed, scaled = x * rstd, dy * weight
    dx = rstd * (scaled - normed * np.mean(scaled * normed, axis=1, keepdims=True))
    return dx, np.sum(dy * normed, axis=0)


def swiglu_forward(x) -> np.ndarray:
    """x[R,2C] = [gate | up] -> silu(gate) * up, [R,C]."""
    gate, up = np.split(_f64(x), 2, axis=1)
    return gate * _sigmoid(gate) * up


def swiglu_backward(dy, x) -> np.ndarray:
    """dy[R,C], x[R,2C] -> dx[R,2C]."""
    dy = _f64(dy)
    gate, up = np.split(_f64(x), 2, axis=1)
    s = _sigmoid(gate)
    return np.concatenate([dy * up * s * (1 + gate * (1 - s)), dy * gate * s], axis=1)


def rope_inv_freq(
    head_dim: int,
    theta: float = 500000.0,
    *,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position: int = 8192,
) -> np.ndarray:
    """float32[D/2] angles a position.

    factor > 1 is llama-3.1's frequency scaling: wavelengths longer than original_max_position / low_freq_factor are
    stretched by factor, those shorter than original_max_position / high_freq_factor are kept, others are blended.
    """
    inv_freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if factor != 1.0:
        wavelength = 2 * math.pi / inv_freq
        blend = (original_max_position / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = np.clip(blend, 0, 1)
        inv_freq = inv_freq * ((1 - blend) / factor + blend)
    return inv_freq.astype(np.float32)


def rope(x, positions, inv_freq, inverse: bool = False) -> np.ndarray:
    """x[T,H,D], positions[T], inv_freq[D/2] -> x rotated: pair (i, i + D/2) by position * inv_freq[i].

    The angle is a product in FP32.

    inverse rotates back: the gradient of rope is its inverse applied to dy.
    """
    x = _f64(x)
    angle = (np.asarray(positions).astype(np.float32)[:, None] * np.asarray(inv_freq, dtype=np.float32)).astype(np.float64)
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :] * (-1 if inverse else 1)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def qkv_heads(heads: int, kv_heads: int, layout: str) -> tuple[list[int], list[int], list[int]]:
    """Where the heads of q, k and v lie among the H + 2G heads of a row. split: q, k, v; grouped: H/G of q, one k, one v, ..."""
    ratio = heads // kv_heads
    if layout == "split":
        order = [("q", heads), ("k", kv_heads), ("v", kv_heads)]
    elif layout == "grouped":
        order = [("q", ratio), ("k", 1), ("v", 1)] * kv_heads
    else:
        raise ValueError(f"layout={layout!r} is not one of split, grouped")
    names = [name for name, count in order for _ in range(count)]
    return tuple([i for i, name in enumerate(names) if name == which] for which in "qkv")


def qkv_rope(qkv, positions, inv_freq, heads: int, kv_heads: int, layout: str = "split") -> tuple[np.ndarray, ...]:
    """qkv[T,(H+2G)*D] -> q[T,H,D] and k[T,G,D] rotated, v[T,G,D]."""
    rows = _f64(qkv).reshape(len(qkv), heads + 2 * kv_heads, 2 * len(inv_freq))
    q, k, v = (rows[:, where] for where in qkv_heads(heads, kv_heads, layout))
    return rope(q, positions, inv_freq), rope(k, positions, inv_freq), v


def qkv_rope_backward(dq, dk, dv, positions, inv_freq, layout: str = "split") -> np.ndarray:
    """dq[T,H,D], dk[T,G,D], dv[T,G,D] -> dqkv[T,(H+2G)*D]."""
    parts = (rope(dq, positions, inv_freq, inverse=True), rope(dk, positions, inv_freq, inverse=True), _f64(dv))
    heads, kv_heads = dq.shape[1], dk.shape[1]
    rows = np.empty((len(dq), heads + 2 * kv_heads, dq.shape[2]))
    for where, part in zip(qkv_heads(heads, kv_heads, layout), parts, strict=True):
        rows[:, where] = part
    return rows.reshape(len(rows), rows.shape[1] * rows.shape[2])


def cross_entropy_forward(logits, labels) -> tuple[np.ndarray, np.ndarray]:
    """logits[T,V], labels[T] -> loss[T] (0 where the label is -100) and lse[T]."""
    logits, labels = _f64(logits), np.asarray(labels)
    top = logits.max(axis=1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))[:, 0]
    kept = labels != IGNORE
    chosen = logits[np.arange(len(labels)), np.where(kept, labels, 0)]
    return np.where(kept, lse - chosen, 0.0), lse


def cross_entropy_backward(dloss, logits, labels) -> np.ndarray:
    """dloss[T] -> dlogits[T,V] = dloss * (softmax - onehot), exactly 0 for ignored tokens."""
    logits, labels = _f64(logits), np.asarray(labels)
    _, lse = cross_entropy_forward(logits, labels)
    grad = np.exp(logits - lse[:, None])
    kept = labels != IGNORE
    grad[np.arange(len(labels))[kept], labels[kept]] -= 1
    return np.where(kept[:, None], grad * _f64(dloss)[:, None], 0.0)


def _f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # exp of a non-positive number only: no overflow for large negative gates.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)
