"""FP8 attention and linear kernels behind one plan, for Megatron-Core and MaxText. Importing this imports no framework."""

from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.ops.quantize.problem import QuantizeProblem
from te_plugin.plan import Plan, PlanError, Target, plan

__version__ = "0.1.0"

__all__ = ["AttentionProblem", "ConfigError", "GemmProblem", "GroupedGemmProblem", "Plan", "PlanError", "QuantizeProblem",
           "Target", "plan"]


def __getattr__(name: str):
    if name == "ConfigError":  # config.py needs omegaconf, which kernels alone do not
        from te_plugin.config import ConfigError

        return ConfigError
    raise AttributeError(f"module 'te_plugin' has no attribute {name!r}")
