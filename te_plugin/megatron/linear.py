"""Column- and row-parallel linear layers: Megatron's splitting and communication around te_plugin's linear.

y = x W^T. Column: W is split over its output features, every rank sees all tokens. Row: W is split over its input features, the
partial sums are added over the ranks. With sequence parallelism the tokens are gathered before a column layer and scattered
after a row layer. Weights are plain parameters in the compute dtype; FP8 copies are made in forward.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide, get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none

from te_plugin.config import ConfigError
from te_plugin.megatron.arguments import initialise_shard, mark_tensor_parallel, new_parameter, refuse_unknown
from te_plugin.megatron.quant import LinearPrecision, parse_payload
from te_plugin.megatron.refused import refuse_unsupported
from te_plugin.torch import functional
from te_plugin.torch.state import LinearState


def default_precision(dtype: torch.dtype) -> LinearPrecision:
    """What a layer computes in when no quant_recipe matches it: its parameters' own dtype."""
    return LinearPrecision("fp32" if dtype == torch.float32 else "bf16")


def make_state(precision: LinearPrecision) -> LinearState | None:
    """The FP8 state of a layer; None for precisions that need none."""
    if not precision.is_fp8:
        return None
    return LinearState(precision.precision, weight_cache=precision.weight_cache == "per_step",
                       keep_transpose=precision.keep_transpose, pow2_scale=precision.pow2_scale,
                       history_len=precision.amax_history_len, amax_compute=precision.amax_compute)


class PrecisionLayer(torch.nn.Module):
    """The precision of a layer with one `weight` [..., out_features, in_features], and its FP8 state.

    precision: the LinearPrecision in force (finish_init sets it from quant_recipe). is_first_microbatch: Megatron sets it at the
    start of a step; the FP8 copy of the weight made then serves the step's other microbatches.
    """

    def _set_precision(self, precision: LinearPrecision) -> None:
        self.precision = precision
        self.reset_state()

    def reset_state(self) -> None:
        """A fresh FP8 state on torch's default device: no cached weight, no amax history."""
        self.state = make_state(self.precision)

    def finish_init(self, quant_config) -> None:
        """Megatron's hook at the end of model construction: take the precision that quant_recipe gives this layer."""
        precision = parse_payload(quant_config, default_precision(self.config.params_dtype))
        where = self.name or (quant_config.match_input.module_path if quant_config is not None else type(self).__name__)
        self.check_precision(precision, where)
        self._set_precision(precision)

    def check_precision(self, precision: LinearPrecision, where: str) -> None:
        """ConfigError where this layer's sizes or the dtype of its parameters cannot be computed in `precision`."""
        precision.check_features(where, self.in_features, self.out_features)
        if precision.precision == "fp32" and self.weight.dtype != torch.float32:
            raise ConfigError(f"{where}: precision fp32 with {self.weight.dtype} parameters; set params_dtype=torch.float32")
        if precision.precision != "fp32" and self.weight.dtype == torch.float32 and not precision.is_fp8:
            raise ConfigError(f"{where}: precision bf16 with FP32 parameters; set params_dtype=torch.bfloat16, or ask for fp32")

    def step_state(self) -> LinearState | None:
        """The FP8 state for one call; the first call of a step drops the weight that was cached in the step before."""
        if self.is_first_microbatch:
            self.is_first_microbatch = False
            if self.state is not None:
                self.state.new_step()
        return self.state

    def call_options(self) -> dict:
        """The options of a call in this layer's precision that are neither tensors nor its state."""
        p = self.precision
        return dict(precision=p.precision, pow2_scale=p.pow2_scale, keep_transpose=p.keep_transpose,
                    accumulate_main_grad=p.main_grad, kernel=p.kernel, fallback=p.fallback)


class ParallelLinear(PrecisionLayer):
    """What both directions share. `split_dim` is the weight dimension that tensor parallelism splits."""

    split_dim: int

    def __init__(self, input_size, output_size, *, config, init_method, bias, skip_bias_add, is_expert, tp_comm_buffer_name,
                 tp_group, stride, name, skip_weight_param_allocation=False, **unknown):
        super().__init__()
        refuse_unknown(type(self), unknown)
        refuse_unsupported(config)
        if skip_weight_param_allocation:
            raise ConfigError(f"{type(self).__name__}: a weight handed in at call time (skip_weight_param_allocation) is not "
                              f"supported; the output layer that needs it is Megatron's own")
        self.config = config
        self.name = name
        self.skip_bias_add = skip_bias_add
        self.is_expert = is_expert
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group, is_expert=is_expert)
        self.tp_size = get_pg_size(self.tp_group)
        # The dispatcher moves the tokens of experts; an expert's linear layers communicate nothing.
        self.communicates = self.tp_size > 1 and not is_expert
        self.sequence_parallel = config.sequence_parallel and self.communicates
        full = (output_size, input_size)
        shard = list(full)
        shard[self.split_dim] = divide(shard[self.split_dim], self.tp_size)
        self.out_features, self.in_features = shard
        # Megatron-FSDP reads these two from the module.
        self.tensor_model_parallel, self.partition_dim = True, self.split_dim

        expert_parallel = is_expert and config.expert_model_parallel_size > 1
        self.weight = new_parameter(tuple(shard), config)
        mark_tensor_parallel(self.weight, self.split_dim, stride, expert_parallel)
        if config.perform_initialization:
            initialise_shard(self.weight, full, self.split_dim, stride, get_pg_rank(self.tp_group), self.tp_size, init_method,
                             is_expert)
        if bias:
            self.bias = new_parameter((self.out_features,), config)
            self._mark_bias(stride, expert_parallel)
            if config.perform_initialization:
                torch.nn.init.zeros_(self.bias)
        else:
            self.register_parameter("bias", None)
        self.is_first_microbatch = True
        self._set_precision(default_precision(config.params_dtype))

    def _mark_bias(self, stride: int, expert_parallel: bool) -> None:
        raise NotImplementedError

    def call_options(self) -> dict:
        return {**super().call_options(), "forward_accumulation": self.precision.forward_accumulation}

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, self.weight, bias, state=self.step_state(), **self.call_options())

    def backward_dw(self) -> None:
        """Nothing is left to do: weight gradients are computed in the backward pass (delay_wgrad_compute is refused)."""

    def extra_repr(self) -> str:
        return (f"in={self.in_features}, out={self.out_features}, precision={self.precision.precision}, tp={self.tp_size}, "
                f"bias={self.bias is not None}")

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Megatron's distributed checkpoint: the weight sharded over tensor-parallel ranks, a row layer's bias replicated."""
        axes = {"weight": self.split_dim}
        if self.split_dim == 0:
            axes["bias"] = 0
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, axes, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=None if metadata is None else metadata["dp_cp_group"])


class ColumnParallelLinear(ParallelLinear):
    """W split over output features (linear_qkv, linear_fc1). forward(x[s,b,K]) -> (y[s,b,N/tp], bias or None)."""

    split_dim = 0

    def __init__(self, input_size: int, output_size: int, *, config, init_method, gather_output: bool = False, bias: bool = False,
                 skip_bias_add: bool = False, is_expert: bool = False, skip_weight_param_allocation: bool = False,
                 tp_comm_buffer_name: str | None = None, tp_group=None, stride: int = 1, name: str | None = None, **unknown):
        super().__init__(input_size, output_size, config=config, init_method=init_method, bias=bias,
                         skip_bias_add=skip_bias_add, is_expert=is_expert, tp_comm_buffer_name=tp_comm_buffer_name,
                         tp_group=tp_group, stride=stride, name=name,
                         skip_weight_param_allocation=skip_weight_param_allocation, **unknown)
        self.gather_output = gather_output

    def _mark_bias(self, stride: int, expert_parallel: bool) -> None:
        mark_tensor_parallel(self.bias, 0, stride, expert_parallel)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        elif self.communicates:
            x = copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        return self.finish(self.multiply(x, None if self.skip_bias_add else self.bias))

    def finish(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What follows the product on this rank."""
        if self.gather_output and self.communicates:
            y = gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, (self.bias if self.skip_bias_add else None)


class RowParallelLinear(ParallelLinear):
    """W split over input features (linear_proj, linear_fc2). forward(x[s,b,K/tp]) -> (y[s,b,N], bias or None)."""

    split_dim = 1

    def __init__(self, input_size: int, output_size: int, *, config, init_method, bias: bool = False,
                 input_is_parallel: bool = True, skip_bias_add: bool = False, is_expert: bool = False,
                 tp_comm_buffer_name: str | None = None, tp_group=None, stride: int = 1, name: str | None = None, **unknown):
        super().__init__(input_size, output_size, config=config, init_method=init_method, bias=bias,
                         skip_bias_add=skip_bias_add, is_expert=is_expert, tp_comm_buffer_name=tp_comm_buffer_name,
                         tp_group=tp_group, stride=stride, name=name, **unknown)
        self.input_is_parallel = input_is_parallel

    def _mark_bias(self, stride: int, expert_parallel: bool) -> None:
        self.bias.allreduce = not expert_parallel
        self.bias.sequence_parallel = self.config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.communicates and not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, group=self.tp_group)
        # A rank's bias would be added once per rank, so with partial sums it waits until they are added up.
        return self.finish(self.multiply(x, self.bias if not self.communicates and not self.skip_bias_add else None))

    def finish(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What follows the product on this rank: the sum over the ranks."""
        if self.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        elif self.communicates:
            y = reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        if self.bias is not None and self.communicates and not self.skip_bias_add:
            y = y + self.bias
        return y, (self.bias if self.skip_bias_add else None)
