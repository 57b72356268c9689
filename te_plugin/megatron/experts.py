"""Mixture of experts for Megatron's MoELayer: grouped experts with token counts on the device, and a router for any device.

Megatron's own grouped experts copy tokens_per_expert to the host and hand lists to TransformerEngine. Here one grouped linear
takes the counts as the tensor they are. Legend: E local experts, M permuted tokens, H hidden, F expert feed-forward size.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import divide, get_pg_rank, get_pg_size

from te_plugin.config import ConfigError
from te_plugin.megatron.arguments import initialise_shard, new_parameter, refuse_unknown
from te_plugin.megatron.checkpoint import sharded_experts
from te_plugin.megatron.linear import PrecisionLayer, default_precision
from te_plugin.megatron.quant import LinearPrecision
from te_plugin.megatron.refused import refuse_unsupported
from te_plugin.torch import functional


class GroupedLinear(PrecisionLayer):
    """E linear layers as one grouped GEMM: y[m] = x[m] weight[expert of m]^T. weight[E, out, in]; split_dim 1: out, 2: in."""

    def __init__(self, num_experts: int, input_size: int, output_size: int, *, config, init_method, split_dim: int, stride: int,
                 pg_collection, name: str | None = None):
        super().__init__()
        self.config, self.name = config, name
        self.tp_group = pg_collection.expt_tp
        self.tp_size = get_pg_size(self.tp_group)
        self.stride = stride
        full = [num_experts, output_size, input_size]
        shard = list(full)
        shard[split_dim] = divide(shard[split_dim], self.tp_size)
        self.num_experts, self.out_features, self.in_features = shard
        self.weight = new_parameter(tuple(shard), config)
        set_tensor_model_parallel_attributes(self.weight, True, split_dim, stride)
        self.weight.allreduce = config.expert_model_parallel_size == 1
        if config.perform_initialization:
            for expert in range(num_experts):
                initialise_shard(self.weight.data[expert], tuple(full[1:]), split_dim - 1, stride, get_pg_rank(self.tp_group),
                                 self.tp_size, init_method, is_expert=True)
        self.is_first_microbatch = True
        self._set_precision(default_precision(config.params_dtype))

    def check_precision(self, precision: LinearPrecision, where: str) -> None:
        super().check_precision(precision, where)
        if precision.precision == "fp8_delayed":
            raise ConfigError("grouped experts with fp8_delayed: amax histories per expert are not kept; use fp8_current, "
                              "fp8_rowwise or fp8_block, or moe.grouped_gemm=false")
        if precision.forward_accumulation != "fp32":
            raise ConfigError(f"grouped experts with forward_accumulation={precision.forward_accumulation}: grouped products add "
                              f"in FP32; leave it out of the payload that matches them, or set moe.grouped_gemm=false")

    def forward(self, x: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return functional.grouped_linear(x, self.weight, tokens_per_expert, state=self.step_state(), **self.call_options())

    def extra_repr(self) -> str:
        return (f"experts={self.num_experts}, in={self.in_features}, out={self.out_features}, "
                f"precision={self.precision.precision}, tp={self.tp_size}")


class GroupedExperts(MegatronModule):
    """The experts of one MoE layer. forward(x[M,H], tokens_per_expert int[E], probs[M]) -> (y[M,H], None); no host copy."""

    def __init__(self, num_local_experts: int, config, *, pg_collection=None, name: str | None = None,
                 fallback: str = "error", **unknown):
        super().__init__(config=config)
        refuse_unknown(type(self), unknown)
        refuse_unsupported(config)
        _refuse_experts(config)
        self.num_local_experts, self.fallback = num_local_experts, fallback
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        ffn = config.moe_ffn_hidden_size
        named = (lambda part: None) if name is None else (lambda part: f"{name}.{part}")
        self.linear_fc1 = GroupedLinear(num_local_experts, config.hidden_size, 2 * ffn, config=config,
                                        init_method=config.init_method, split_dim=1, stride=2, pg_collection=pg_collection,
                                        name=named("linear_fc1"))
        self.linear_fc2 = GroupedLinear(num_local_experts, ffn, config.hidden_size, config=config,
                                        init_method=config.output_layer_init_method, split_dim=2, stride=1,
                                        pg_collection=pg_collection, name=named("linear_fc2"))

    def forward(self, permuted_hidden: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor, /):
        counts = tokens_per_expert.to(device=permuted_hidden.device, dtype=torch.int32, non_blocking=True)
        hidden = functional.swiglu(self.linear_fc1(permuted_hidden, counts), fallback=self.fallback)
        hidden = (hidden * permuted_probs.unsqueeze(-1)).to(hidden.dtype)
        return self.linear_fc2(hidden, counts), None

    def backward_dw(self) -> None:
        """Nothing is left to do: weight gradients are computed in the backward pass."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Megatron's distributed checkpoint, under the same keys and shapes as SequentialMLP's: the two can load each other."""
        return sharded_experts(self, prefix, sharded_offsets)


class Router(TopKRouter):
    """Megatron's top-k router; its gate runs where the tokens are (the stock one moves CPU weights to CUDA)."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        if input.is_cuda:
            return super().gating(input)
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


def _refuse_experts(config) -> None:
    if config.add_bias_linear:
        raise ConfigError("add_bias_linear=True: grouped experts have no bias; set it to False, or moe_grouped_gemm=False")
    if not config.gated_linear_unit or config.activation_func is not torch.nn.functional.silu:
        raise ConfigError("grouped experts compute SwiGLU: set gated_linear_unit=True and activation_func=silu, or "
                          "moe_grouped_gemm=False")
    for name in ("moe_apply_probs_on_input", "moe_latent_size", "moe_paged_stash", "moe_mlp_glu_interleave_size",
                 "activation_func_clamp_value", "glu_linear_offset"):
        if getattr(config, name, None):
            raise ConfigError(f"config.{name}={getattr(config, name)!r} is not supported by grouped experts; unset it, or set "
                              f"moe_grouped_gemm=False")
    if config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or []):
        raise ConfigError("recompute_modules has 'moe_act': grouped experts do not recompute their activation; remove it")
