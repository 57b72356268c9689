"""The float64 answer to a case, and the natural size of each number in it.

An exact gradient can be 0 by cancellation (one key: dS = P * (dP - delta) = 0) where correct FP32 leaves rounding noise. The
natural size is the same sum with absolute values; noise is judged against it, never against 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from te_plugin import oracle
from te_plugin.oracle.attention import softmax

from .problems import AttentionCase

FP64_EXACT = {"fp32", "fp64"}


@dataclass(frozen=True)
class AttentionAnswer:
    """Each field: float64 out[Tq,H,D], dq, dk[Tk,G,D], dv; lse[H,Tq]. size: the same names with natural sizes (not lse)."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    size: dict[str, np.ndarray]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x as a tensor of `dtype` holds it, in float64."""
    import ml_dtypes

    kinds = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=np.float32).astype(kinds[dtype]).astype(np.float64)


def rounded_inputs(case: AttentionCase, dtype: str) -> dict[str, np.ndarray]:
    return {name: rounded(x, dtype) for name, x in case.inputs().items()}


@functools.lru_cache(maxsize=512)
def attention_answer(case: AttentionCase, dtype: str) -> AttentionAnswer:
    return answer_for(case, rounded_inputs(case, dtype))


def answer_for(case: AttentionCase, inputs: dict[str, np.ndarray]) -> AttentionAnswer:
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    segments = (case.cu_q, case.cu_k, case.start_q, case.start_k)
    options = {"mask": case.mask, "window": case.window, "scale": case.scale}
    out, lse = oracle.attention_forward(q, k, v, *segments, **options)
    dq, dk, dv = oracle.attention_backward(dout, q, k, v, *segments, **options)
    return AttentionAnswer(out, lse, dq, dk, dv, _natural_sizes(case, q, k, v, dout))


def _natural_sizes(case, q, k, v, dout) -> dict[str, np.ndarray]:
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    ratio = case.heads // case.kv_heads
    size = {"out": np.zeros(q.shape), "dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    for n in range(case.segments):
        rows, keys = case.q_range(n), case.k_range(n)
        seen = oracle.visible_keys(rows.stop - rows.start, keys.stop - keys.start, case.mask, case.window)
        for h in range(case.heads):
            g = h // ratio
            p, _ = softmax(q[rows, h] @ k[keys, g].T * scale, seen)
            # A score is a sum of D products: its rounding is relative to their absolute sum and moves P by as much.
            p = p * (1 + np.abs(q[rows, h]) @ np.abs(k[keys, g]).T * scale)
            ds = p * (np.abs(dout[rows, h]) @ np.abs(v[keys, g]).T)
            size["out"][rows, h] = p @ np.abs(v[keys, g])
            size["dq"][rows, h] = ds @ np.abs(k[keys, g]) * scale
            size["dk"][keys, g] += ds.T @ np.abs(q[rows, h]) * scale
            size["dv"][keys, g] += p.T @ np.abs(dout[rows, h])
    return size
