"""RMSNorm and SwiGLU as the modules Megatron's layer specs ask for."""

from __future__ import annotations

import torch

from te_plugin.config import ConfigError
from te_plugin.megatron.arguments import new_parameter, refuse_unknown
from te_plugin.torch import functional


def refuse_other_norms(config) -> None:
    """ConfigError when a TransformerConfig asks for a norm that is not plain RMSNorm."""
    if config.normalization != "RMSNorm":
        raise ConfigError(f"normalization={config.normalization!r}: this norm is RMSNorm; set normalization='RMSNorm'")
    if getattr(config, "layernorm_zero_centered_gamma", False):
        raise ConfigError("layernorm_zero_centered_gamma=True: this norm multiplies by its weight, not by one plus it; "
                          "set it to False")


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in FP32.

    Built as (config=, hidden_size=, eps=); fallback: what framework maths on a GPU means (plan.plan). has_residual: Megatron goes
    on with the norm's input beside its output; with config.fused_residual_rmsnorm the result is then (output, input), and the
    gradient of that input is added inside the norm's backward.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, *, has_residual: bool = False, fallback: str = "error",
                 **unknown):
        super().__init__()
        refuse_unknown(type(self), unknown)
        refuse_other_norms(config)
        self.eps, self.fallback = eps, fallback
        self.return_input = has_residual and getattr(config, "fused_residual_rmsnorm", False)
        self.weight = new_parameter((hidden_size,), config)
        if config.perform_initialization:
            torch.nn.init.ones_(self.weight)
        # Under sequence parallelism each rank normalises its own tokens: Megatron then reduces this gradient over the TP group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return functional.rms_norm(x, self.weight, self.eps, return_input=self.return_input, fallback=self.fallback)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up for x[..., 2F] = [gate | up] -> [..., F]. Built as (config=)."""

    def __init__(self, *, config, fallback: str = "error", **unknown):
        super().__init__()
        refuse_unknown(type(self), unknown)
        self.fallback = fallback
        if not config.gated_linear_unit or config.activation_func is not torch.nn.functional.silu:
            raise ConfigError("the plugin's activation is SwiGLU: set gated_linear_unit=True and activation_func=silu, or "
                              "use_te_activation_func=False for Megatron's own activation")
        if config.activation_func_clamp_value is not None or config.glu_linear_offset:
            raise ConfigError("activation_func_clamp_value and glu_linear_offset are not available in the plugin's SwiGLU; "
                              "unset them, or set use_te_activation_func=False for Megatron's own activation")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.swiglu(x, fallback=self.fallback)
