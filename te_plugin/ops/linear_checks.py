"""Size checks of a linear layer that every framework's layer makes."""

from __future__ import annotations

from te_plugin import numerics


def check_features(in_features: int, out_features: int, precision: str) -> None:
    """ValueError naming the one feature size that the precision's GEMM cannot take, and the multiple it needs."""
    kind = numerics.scaling(precision)
    if kind is None:
        return
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size % kind.feature_multiple:
            raise ValueError(f"{name}={size} is not a multiple of {kind.feature_multiple}, which precision {precision} needs; "
                             f"pad the layer or leave it in bf16")
