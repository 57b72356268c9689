"""RMSNorm + column-parallel linear as one module, and the MLP as one call: FP8 is made where the values are made.

Names and checkpoints are those Megatron uses for a norm fused into the linear layer after it: layer_norm_weight beside weight.
Every number equals that of the separate modules.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP

from te_plugin.config import ConfigError
from te_plugin.megatron.arguments import new_parameter
from te_plugin.megatron.linear import ColumnParallelLinear, RowParallelLinear
from te_plugin.megatron.norm import SwiGLU, refuse_other_norms
from te_plugin.torch import functional
from te_plugin.torch.modules import must_be_called


def _sum_over(gradient: torch.Tensor, group) -> torch.Tensor:
    """The sum of the ranks' parts: each tensor-parallel rank knows the gradient that flows through its own output features."""
    gradient = gradient.contiguous()
    torch.distributed.all_reduce(gradient, group=group)
    return gradient


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm with layer_norm_weight[K], then W split over output features. forward(x[s,b,K]) -> (y[s,b,N/tp], bias or None).

    x is not normed yet. Under sequence parallelism each rank normalises its own tokens before they are gathered, so there the
    norm's output is BF16, and quantised after the gather.
    """

    def __init__(self, input_size: int, output_size: int, *, config, init_method, gather_output: bool = False, bias: bool = False,
                 skip_bias_add: bool = False, is_expert: bool = False, skip_weight_param_allocation: bool = False,
                 tp_comm_buffer_name: str | None = None, tp_group=None, stride: int = 1, name: str | None = None, **unknown):
        if is_expert:
            raise ConfigError("LayerNormColumnParallelLinear with is_expert=True: the norm of a mixture of experts stands before "
                              "its router; use ColumnParallelLinear for experts")
        refuse_other_norms(config)
        super().__init__(input_size, output_size, config=config, init_method=init_method, gather_output=gather_output, bias=bias,
                         skip_bias_add=skip_bias_add, is_expert=is_expert,
                         skip_weight_param_allocation=skip_weight_param_allocation, tp_comm_buffer_name=tp_comm_buffer_name,
                         tp_group=tp_group, stride=stride, name=name, **unknown)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = new_parameter((input_size,), config)
        if config.perform_initialization:
            torch.nn.init.ones_(self.layer_norm_weight)
        # Under sequence parallelism each rank normalises its own tokens: Megatron then reduces this gradient over the TP group.
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.layer_norm_weight, self.eps, fallback=self.precision.fallback)

    @functools.cached_property
    def reduce_gradient(self):
        """What the gradient of the normed tensor passes through before RMSNorm's backward; None where one rank has all of it."""
        return functools.partial(_sum_over, group=self.tp_group) if self.communicates else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.sequence_parallel or not self.precision.is_fp8:
            return super().forward(self.norm(x))
        y = functional.layer_norm_linear(
            x, self.layer_norm_weight, self.weight, None if self.skip_bias_add else self.bias, self.eps, state=self.step_state(),
            reduce_gradient=self.reduce_gradient, **self.call_options())
        return self.finish(y)


class GatedMLP(MLP):
    """Megatron's MLP; where both linear layers compute in one FP8 precision, [norm,] fc1, SwiGLU and fc2 are one call.

    Everything else runs as Megatron's MLP does, with the same numbers: other precisions, biases, per-token scales, hooks on the
    linear layers (which only a call would run).
    """

    def forward(self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs):
        if per_token_scale is not None or not self._is_one_call():
            return super().forward(hidden_states, per_token_scale, **kwargs)
        fc1, fc2, x = self.linear_fc1, self.linear_fc2, hidden_states
        norm_weight, eps, reduce_gradient = None, self.config.layernorm_epsilon, None
        has_norm = isinstance(fc1, LayerNormColumnParallelLinear)
        if fc1.sequence_parallel:
            x = gather_from_sequence_parallel_region(fc1.norm(x) if has_norm else x, group=fc1.tp_group)
        elif has_norm:
            norm_weight, reduce_gradient = fc1.layer_norm_weight, fc1.reduce_gradient
        elif fc1.communicates:
            x = copy_to_tensor_model_parallel_region(x, group=fc1.tp_group)
        y = functional.gated_mlp(x, norm_weight, fc1.weight, fc2.weight, eps, states=(fc1.step_state(), fc2.step_state()),
                                 reduce_gradient=reduce_gradient, **fc1.call_options())
        return fc2.finish(y)

    def _is_one_call(self) -> bool:
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        return (isinstance(fc1, ColumnParallelLinear) and isinstance(fc2, RowParallelLinear)
                and isinstance(self.activation_func, SwiGLU) and self.config.use_te_activation_func
                and fc1.precision.is_fp8 and fc1.precision == fc2.precision
                and fc1.bias is None and fc2.bias is None and not fc1.gather_output and fc2.input_is_parallel
                and not any(must_be_called(layer) for layer in (fc1, fc2, self.activation_func)))
