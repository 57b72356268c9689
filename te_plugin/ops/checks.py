"""Reasons that several ops share. Each helper returns None when there is nothing to say."""

from __future__ import annotations

FLOAT_DTYPES = ("fp32", "bf16", "fp16")


def wrong_arch(target, *arches: str) -> str | None:
    if target.arch in arches:
        return None
    return f"runs on {', '.join(arches)}, not on {target.arch}"


def wrong_dtype(dtype: str, *allowed: str) -> str | None:
    return None if dtype in allowed else f"takes {', '.join(allowed)}, not {dtype}"


def first_reason(*reasons: str | None) -> str | None:
    return next((reason for reason in reasons if reason), None)
