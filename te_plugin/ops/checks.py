"""Reasons that several ops share (each helper but the last two returns None when there is nothing to say), and flags."""

from __future__ import annotations

from te_plugin.plan import Supported, Target, Unsupported

FLOAT_DTYPES = ("fp32", "bf16", "fp16")


def wrong_arch(target, *arches: str) -> str | None:
    if target.arch in arches:
        return None
    return f"runs on {', '.join(arches)}, not on {target.arch}"


def wrong_dtype(dtype: str, *allowed: str) -> str | None:
    return None if dtype in allowed else f"takes {', '.join(allowed)}, not {dtype}"


def first_reason(*reasons: str | None) -> str | None:
    return next((reason for reason in reasons if reason), None)


def pointwise_maths(problem, target: Target) -> Supported | Unsupported:
    """`supports` of the composite kernels that compute in FP32 whatever the dtype of their tensors."""
    reason = first_reason(
        "has no JAX form: XLA fuses plain jax.numpy at least as well" if target.framework == "jax" else None,
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
    )
    return Unsupported(reason) if reason else Supported("framework maths")


def check_flags(**flags) -> None:
    """ValueError for a flag that is neither True nor False: "no" and "none" would count as true."""
    for name, value in flags.items():
        if value is not True and value is not False:
            raise ValueError(f"{name}={value!r} must be True or False")
