"""Attention with FP8 operands in float64: what is quantised, with which scale, and where.

Q, K, V and dO are quantised per tensor, per head or per row; P in [0, 1] with a constant scale; dS per head of a
segment or per 128x128 tile. The statistics (max, sum, log-sum-exp) are exact and never see a quantised P.

Two exact changes of variables reduce the error for no extra product (Fp8AttentionScheme): K centred on its mean, and
Q and K rotated by one orthogonal matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from te_plugin.numerics import BLOCK, E4M3, Fp8Format, scale_from_amax
from te_plugin.oracle.attention import segment_table, softmax, visible_keys


@dataclass(frozen=True)
class Fp8AttentionScheme:
    """operands: "tensor", "head" or "row": what shares a scale in Q, K, V, dO.

    ds: what shares a scale in dS: "head" (of a segment) or "tile" (128x128). p_scale: constant scale of P.
    centre_k: subtract each segment's mean key (softmax is unchanged; rows of dS sum to zero).
    rotate: Hadamard-rotate Q and K along D (a power of two); dQ and dK are rotated back.
    """

    operands: str = "tensor"
    forward_format: Fp8Format = E4M3
    gradient_format: Fp8Format = E4M3
    ds: str = "tile"
    p_scale: float = 256.0
    centre_k: bool = False
    rotate: bool = False


def fp8_attention_forward(
    q,
    k,
    v,
    cu_q,
    cu_k=None,
    start_q=None,
    start_k=None,
    *,
    mask="causal",
    window=None,
    scale=None,
    scheme: Fp8AttentionScheme = Fp8AttentionScheme(),
) -> tuple[np.ndarray, np.ndarray]:
    """As attention_forward with every operand in FP8: out[Tq,H,D] and lse[H,Tq] (of the quantised Q and K)."""
    case = _Prepared(q, k, v, cu_q, cu_k, start_q, start_k, mask, scale, scheme)
    out, lse = np.zeros((len(case.q), case.heads, case.v.shape[2])), np.full((case.heads, len(case.q)), -np.inf)
    for rows, keys, seen in case.segments(window):
        for h in range(case.heads):
            p, lse[h, rows] = softmax(case.q[rows, h] @ case.k[keys, h // case.ratio].T * case.scale, seen)
            # The kernel holds exp(score - row max), quantises that, and divides by the exact sum at the end.
            top = p.max(axis=1, keepdims=True, initial=0)
            unnormalised = np.divide(p, top, out=np.zeros_like(p), where=top > 0)
            out[rows, h] = case.quantize_p(unnormalised) * top @ case.v[keys, h // case.ratio]
    return out, lse


def fp8_attention_backward(
    dout,
    q,
    k,
    v,
    cu_q,
    cu_k=None,
    start_q=None,
    start_k=None,
    *,
    mask="causal",
    window=None,
    scale=None,
    scheme: Fp8AttentionScheme = Fp8AttentionScheme(),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As attention_backward with Q, K, V, dO, P and dS in FP8.

    delta = rowsum(dO * O) takes the quantised dO: every row of dS then sums to (nearly) zero, which is what makes a
    constant offset of the keys harmless; with the exact dO an offset of K raises the error of dQ by a fifth.
    """
    case = _Prepared(q, k, v, cu_q, cu_k, start_q, start_k, mask, scale, scheme)
    forward = fp8_attention_forward(q, k, v, cu_q, cu_k, start_q, start_k, mask=mask, window=window, scale=scale, scheme=scheme)[
        0
    ]
    dout = case.masked_q(np.asarray(dout).astype(np.float64))
    dout8 = _quantize_operand(dout, scheme.operands, scheme.gradient_format)
    dq, dk, dv = np.zeros(case.q.shape), np.zeros(case.k.shape), np.zeros(case.v.shape)
    for rows, keys, seen in case.segments(window):
        for h in range(case.heads):
            g = h // case.ratio
            p, _ = softmax(case.q[rows, h] @ case.k[keys, g].T * case.scale, seen)
            delta = np.sum(dout8[rows, h] * forward[rows, h], axis=1, keepdims=True)
            ds = np.where(seen, p * (dout8[rows, h] @ case.v[keys, g].T - delta), 0.0)
            ds8 = _quantize_tiles(ds, scheme.gradient_format, scheme.ds)
            dq[rows, h] = ds8 @ case.k[keys, g] * case.scale
            dk[keys, g] += ds8.T @ case.q[rows, h] * case.scale
            dv[keys, g] += case.quantize_p(p).T @ dout8[rows, h]
    return case.unrotate(dq), case.unrotate(dk), dv


class _Prepared:
    """Quantised operands of one call, with rows outside segments set to 0 so that they never enter an amax."""

    def __init__(self, q, k, v, cu_q, cu_k, start_q, start_k, mask, scale, scheme):
        q, k, v = (np.asarray(x) for x in (q, k, v))
        self.heads, self.ratio = q.shape[1], q.shape[1] // k.shape[1]
        self.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.mask, self.scheme = mask, scheme
        self.table = segment_table(cu_q, cu_k, start_q, start_k, q_rows=len(q), k_rows=len(k), mask=mask)
        self.q_rows = _covered(len(q), [(s.q_begin, s.q_end) for s in self.table])
        k_rows = _covered(len(k), [(s.k_begin, s.k_end) for s in self.table])
        q = self.masked_q(q.astype(np.float64))
        k, v = (np.where(k_rows[:, None, None], x.astype(np.float64), 0.0) for x in (k, v))
        if scheme.centre_k:
            for s in self.table:
                if s.k_len:
                    k[s.k_begin : s.k_end] -= k[s.k_begin : s.k_end].mean(axis=0)
        self.rotation = _hadamard(q.shape[-1]) if scheme.rotate else None
        if self.rotation is not None:
            q, k = q @ self.rotation, k @ self.rotation
        self.q, self.k, self.v = (_quantize_operand(x, scheme.operands, scheme.forward_format) for x in (q, k, v))

    def segments(self, window):
        for s in self.table:
            yield (
                slice(s.q_begin, s.q_end),
                slice(s.k_begin, s.k_end),
                visible_keys(s.q_len, s.k_len, self.mask, window),
            )

    def masked_q(self, x):
        return np.where(self.q_rows[:, None, None], x, 0.0)

    def quantize_p(self, p):
        scale = np.float32(self.scheme.p_scale)
        fmt = self.scheme.forward_format
        return fmt.decode(fmt.encode(p.astype(np.float32) * scale)).astype(np.float64) / float(scale)

    def unrotate(self, x):
        return x if self.rotation is None else x @ self.rotation.T


def _quantize_operand(x: np.ndarray, share: str, fmt: Fp8Format) -> np.ndarray:
    axes = {"tensor": (0, 1, 2), "head": (0, 2), "row": (2,)}
    if share not in axes:
        raise ValueError(f"operands={share!r} is not one of {', '.join(axes)}")
    return _cast(x, np.abs(x).max(axis=axes[share], keepdims=True, initial=0), fmt)


def _quantize_tiles(ds: np.ndarray, fmt: Fp8Format, share: str) -> np.ndarray:
    if share == "head":
        return _cast(ds, np.abs(ds).max(initial=0), fmt)
    if share != "tile":
        raise ValueError(f"ds={share!r} is not one of head, tile")
    out = np.zeros_like(ds)
    for i in range(0, ds.shape[0], BLOCK):
        for j in range(0, ds.shape[1], BLOCK):
            tile = ds[i : i + BLOCK, j : j + BLOCK]
            out[i : i + BLOCK, j : j + BLOCK] = _cast(tile, np.abs(tile).max(initial=0), fmt)
    return out


def _cast(x: np.ndarray, amax, fmt: Fp8Format) -> np.ndarray:
    scale, scale_inv = scale_from_amax(amax, fmt)
    return fmt.decode(fmt.encode(x.astype(np.float32) * scale)).astype(np.float64) * scale_inv.astype(np.float64)


def _covered(rows: int, ranges) -> np.ndarray:
    covered = np.zeros(rows, dtype=bool)
    for begin, end in ranges:
        covered[begin:end] = True
    return covered


def _hadamard(size: int) -> np.ndarray:
    if size & (size - 1):
        raise ValueError(f"rotate needs a head dim that is a power of two, got {size}")
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)
