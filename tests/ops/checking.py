"""Assertions of the suite. A failure names the segment, the output, the error and the first differing index."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from te_plugin import oracle

from .problems import AttentionCase
from .reference import AttentionAnswer


@dataclass(frozen=True)
class Bound:
    """Largest relative error of outputs and gradients; smallest cosine; noise: error against the natural size that passes
    where the exact number is small by cancellation; lse: absolute error of the log-sum-exp."""

    out: float
    grad: float
    cosine: float
    noise: float
    lse: float


# Measured on the whole table, then rounded up by about a factor of two.
BOUNDS = {
    "fp32": Bound(out=2e-6, grad=5e-6, cosine=0.999999, noise=1e-6, lse=2e-5),
    "bf16": Bound(out=5e-3, grad=1e-2, cosine=0.99995, noise=4e-3, lse=2e-5),
    "fp16": Bound(out=1e-3, grad=2e-3, cosine=0.99999, noise=1e-3, lse=2e-5),
    "fp8": Bound(out=5.5e-2, grad=8e-2, cosine=0.995, noise=6e-2, lse=0.5),
}


def bound_of(dtype: str, dq: str = "fp32") -> Bound:
    """The bound of a kernel for tensors of `dtype`; a dQ accumulated in bf16 is no better than bf16."""
    bound, coarse = BOUNDS[dtype], BOUNDS["bf16"]
    if dq == "fp32":
        return bound
    return dataclasses.replace(bound, grad=coarse.grad, cosine=coarse.cosine, noise=coarse.noise)


def check_attention(case: AttentionCase, result: dict[str, np.ndarray], answer: AttentionAnswer, bound: Bound) -> None:
    """Every output of every segment within `bound`; every row outside the segments exactly 0 (log-sum-exp -inf)."""
    problems = []
    for name, got in result.items():
        if name == "lse":
            problems += _check_lse(case, got, answer.lse, bound)
            continue
        side = "q" if name in ("out", "dq") else "k"
        want, size = getattr(answer, name), answer.size[name]
        rows = case.q_range if side == "q" else case.k_range
        for n in range(case.segments):
            limit = bound.out if name == "out" else bound.grad
            problem = _check_block(got[rows(n)], want[rows(n)], size[rows(n)], limit, bound)
            if problem:
                problems.append(f"segment {n} {name}: {problem}")
        stray = got[case.outside(side)]
        if stray.size and not (stray == 0).all():
            first = tuple(int(i) for i in np.argwhere(~(got == 0) & case.outside(side)[:, None, None])[0])
            problems.append(f"{name}{list(first)} lies outside every segment and is {got[first]!r}, not 0")
    assert not problems, f"{case.name}:\n  " + "\n  ".join(problems)


def _check_block(got, want, size, limit: float, bound: Bound) -> str | None:
    if not want.size:
        return None
    found = oracle.compare(got, want, limit)
    if found.relative <= limit and found.cosine >= bound.cosine:
        return None
    error, scale = np.linalg.norm(got - want), np.linalg.norm(size)
    # NaN fails both comparisons.
    if error <= bound.noise * scale and np.linalg.norm(want) < 0.1 * scale:
        return None
    return str(found)


def _check_lse(case, got, want, bound: Bound) -> list[str]:
    infinite = np.isneginf(want)
    if not np.array_equal(np.isneginf(got), infinite):
        first = np.argwhere(np.isneginf(got) != infinite)[0].tolist()
        return [f"lse{first}: got {got[tuple(first)]!r}, want {want[tuple(first)]!r}"]
    finite_got, finite_want = (np.where(infinite, 0.0, x) for x in (got, want))
    error, allowed = np.abs(finite_got - finite_want), bound.lse * np.maximum(1, np.abs(finite_want))
    if not (error <= allowed).all():
        first = np.argwhere(~(error <= allowed))[0].tolist()
        return [f"lse{first}: got {got[tuple(first)]!r}, want {want[tuple(first)]!r}"]
    return []


def check_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray], what: str) -> None:
    """Equal values everywhere, NaN nowhere (the arrays are exact images of the kernel's dtype)."""
    for name in want:
        assert not np.isnan(got[name]).any(), f"{what}: {name} holds NaN at {np.argwhere(np.isnan(got[name]))[0].tolist()}"
        if not np.array_equal(got[name], want[name]):
            first = tuple(int(i) for i in np.argwhere(got[name] != want[name])[0])
            raise AssertionError(f"{what}: {name}{list(first)} is {got[name][first]!r}, not {want[name][first]!r}")
