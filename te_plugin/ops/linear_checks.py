"""Checks of a linear layer's sizes, scales and of the way it adds up, the same in every framework."""

from __future__ import annotations

from te_plugin import numerics
from te_plugin.ops.gemm.problem import ACCUMULATIONS


def check_features(in_features: int, out_features: int, precision: str) -> None:
    """ValueError naming the one feature size that the precision's GEMM cannot take, and the multiple it needs."""
    kind = numerics.scaling(precision)
    if kind is None:
        return
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size % kind.feature_multiple:
            raise ValueError(f"{name}={size} is not a multiple of {kind.feature_multiple}, which precision {precision} needs; "
                             f"pad the layer or leave it in bf16")


def accumulation_reason(accumulation: str, precision: str) -> str | None:
    """Why the forward product of a layer in `precision` cannot add up as forward_accumulation says; None where it can.

    Which machines have a kernel for it is the plan's answer.
    """
    if accumulation not in ACCUMULATIONS:
        return f"forward_accumulation={accumulation!r} is not one of {', '.join(ACCUMULATIONS)}"
    if accumulation == "fp32" or _scales_follow_the_sum(precision):
        return None
    why = ("only FP8 products have a fast mode" if numerics.scaling(precision) is None else
           "the sums of its blocks are scaled and added in FP32")
    able = ", ".join(name for name in numerics.PRECISIONS if _scales_follow_the_sum(name))
    return f"forward_accumulation={accumulation} with precision={precision}: {why}; leave it out, or use one of {able}"


def _scales_follow_the_sum(precision: str) -> bool:
    """Whether scales are applied to whole sums over the in features, as those of a tensor and of a row are."""
    kind = numerics.scaling(precision)
    return kind is not None and {kind.activation, kind.weight} <= {"tensor", "row"}


def check_accumulation(accumulation: str, precision: str) -> None:
    """ValueError where accumulation_reason has one."""
    if reason := accumulation_reason(accumulation, precision):
        raise ValueError(reason)


def check_pow2(precision: str, pow2_scale: bool) -> None:
    """ValueError for a way to compute scales where a precision computes none."""
    kind = numerics.scaling(precision)
    if pow2_scale and (kind is None or kind.delayed):
        why = "has no scales" if kind is None else "takes scales from an amax history"
        raise ValueError(f"pow2_scale=True: precision {precision} {why}; leave it out, or use another FP8 precision")
