"""The statistics of paired runs: n is the number of pairs, never of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def t_cdf(t: float, df: int) -> float:
    """P(T <= t) of Student's t with an integer number of degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if df < 1:
        raise ValueError(f"df={df} must be at least 1")
    theta = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    if df % 2:
        term, total = cosine, 0.0
        for k in range(1, df - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        area = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 0.0
        for k in range(0, df - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        area = sine * total
    return 0.5 + 0.5 * area


def t_quantile(probability: float, df: int) -> float:
    """The t whose CDF is `probability`, by bisection."""
    if not 0 < probability < 1:
        raise ValueError(f"probability={probability} must lie strictly between 0 and 1")
    low, high = -1e6, 1e6
    while high - low > 1e-12 * max(1.0, abs(low), abs(high)):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class PairedMean:
    """Mean of paired differences with its one-sided upper bound. n pairs, standard deviation over pairs."""

    n: int
    mean: float
    deviation: float
    upper: float
    confidence: float


def paired_mean(differences: Sequence[float], confidence: float = 0.95) -> PairedMean:
    """Upper one-sided bound mean + t * sd / sqrt(n). ValueError below two pairs: one pair has no spread."""
    n = len(differences)
    if n < 2:
        raise ValueError(f"{n} pair(s) give no bound; at least two are needed, and three to be useful")
    mean = math.fsum(differences) / n
    deviation = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    return PairedMean(n, mean, deviation, mean + t_quantile(confidence, n - 1) * deviation / math.sqrt(n), confidence)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def slope(values: Sequence[float]) -> float:
    """Least-squares slope per position; 0 for fewer than two values."""
    n = len(values)
    if n < 2:
        return 0.0
    centre, mean = (n - 1) / 2, math.fsum(values) / n
    return math.fsum((i - centre) * (v - mean) for i, v in enumerate(values)) / math.fsum(
        (i - centre) ** 2 for i in range(n)
    )


def spikes(losses: Sequence[float], window: int = 20, jump: float = 0.5) -> int:
    """Steps whose loss is more than `jump` nats above the median of the `window` steps before."""
    return sum(loss > median(losses[i - window : i]) + jump for i, loss in enumerate(losses) if i >= window)
