"""The values by which te_plugin is chosen in a MaxText configuration."""

from __future__ import annotations

import enum

ATTENTION = "te_plugin"
PREFIX = "te_plugin_"


class PluginQuantization(enum.StrEnum):
    """`quantization=` values of te_plugin. no_quant: the same modules with plain products, the right baseline for FP8."""

    NO_QUANT = "te_plugin_no_quant"
    FP8_CURRENT = "te_plugin_fp8_current"
    FP8_DELAYED = "te_plugin_fp8_delayed"
    FP8_ROWWISE = "te_plugin_fp8_rowwise"
    FP8_BLOCK = "te_plugin_fp8_block"
    MXFP8 = "te_plugin_mxfp8"


def precision_of(quantization) -> str | None:
    """The te_plugin precision that a `quantization=` value asks for; "bf16" means plain products; None: it is not ours."""
    value = getattr(quantization, "value", quantization)
    if value not in {member.value for member in PluginQuantization}:
        return None
    return "bf16" if value == PluginQuantization.NO_QUANT.value else value[len(PREFIX) :]


def quantization_of(precision: str) -> str:
    """The `quantization=` value of a te_plugin precision (fp32 and bf16: no_quant)."""
    return PluginQuantization.NO_QUANT.value if precision in ("fp32", "bf16") else PREFIX + precision
