"""Modules for torch on top of functional.py. They know nothing of parallelism; adapters add it."""

from __future__ import annotations

import math

import torch
from torch import nn

from te_plugin import numerics
from te_plugin.ops.checks import check_flags
from te_plugin.ops.linear_checks import check_accumulation, check_features
from te_plugin.torch import functional as F
from te_plugin.torch.grouped import refuse_delayed
from te_plugin.torch.state import LinearState


def make_state(precision: str, options: dict, device=None) -> LinearState | None:
    """The FP8 state of a layer with these state_options (see LinearState); ValueError for options that would do nothing."""
    if numerics.scaling(precision) is None:
        if options:
            raise ValueError(f"{', '.join(options)}: precision {precision} has no FP8 state, so these options do nothing")
        return None
    return LinearState(precision, device=device, **options)


def _call_options(layer: nn.Module) -> dict:
    """The options of a layer's call that are neither tensors nor its state."""
    state = layer.state
    return dict(pow2_scale=state.pow2_scale if state is not None else False,
                keep_transpose=state.keep_transpose if state is not None else True,
                accumulate_main_grad=layer.accumulate_main_grad, forward_accumulation=layer.forward_accumulation,
                kernel=layer.kernel, fallback=layer.fallback)


class Linear(nn.Module):
    """y[...,out] = x[...,in] W^T + b in a given precision, with a weight cache and (fp8_delayed) amax histories.

    accumulate_main_grad: dW is added to weight.main_grad (FP32, set by the caller) in place of weight.grad.
    forward_accumulation: fp32 or fast (functional.linear).
    state_options: weight_cache, keep_transpose, pow2_scale, history_len, amax_compute (see LinearState).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, precision: str = "bf16", device=None,
                 dtype=None, accumulate_main_grad: bool = False, forward_accumulation: str = "fp32", kernel: str = "auto",
                 fallback: str = "error", **state_options):
        super().__init__()
        check_flags(bias=bias, accumulate_main_grad=accumulate_main_grad)
        check_features(in_features, out_features, precision)
        check_accumulation(forward_accumulation, precision)
        self.in_features, self.out_features, self.precision = in_features, out_features, precision
        self.accumulate_main_grad, self.kernel, self.fallback = accumulate_main_grad, kernel, fallback
        self.forward_accumulation = forward_accumulation
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.state = make_state(precision, state_options, device)
        if self.weight.device.type != "meta":
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, precision={self.precision}"

    def forward(self, x: torch.Tensor, row_mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias, self.precision, state=self.state, row_mask=row_mask, **_call_options(self))


class GroupedLinear(nn.Module):
    """One weight[out,in] an expert; forward(x[M,in], group_sizes[E]) -> [M,out].

    accumulate_main_grad: as in Linear. state_options: weight_cache, keep_transpose, pow2_scale (see LinearState); fp8_delayed is
    refused (a history per tensor).
    """

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, precision: str = "bf16", device=None, dtype=None,
                 accumulate_main_grad: bool = False, kernel: str = "auto", fallback: str = "error", **state_options):
        super().__init__()
        check_flags(accumulate_main_grad=accumulate_main_grad)
        refuse_delayed(precision)
        check_features(in_features, out_features, precision)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.precision, self.kernel, self.fallback = precision, kernel, fallback
        self.accumulate_main_grad = accumulate_main_grad
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        self.state = make_state(precision, state_options)
        if self.weight.device.type != "meta":
            for expert in self.weight:
                nn.init.kaiming_uniform_(expert, a=math.sqrt(5))

    def extra_repr(self) -> str:
        return f"{self.num_groups} x ({self.in_features} -> {self.out_features}), precision={self.precision}"

    def forward(self, x: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
        state = self.state
        return F.grouped_linear(x, self.weight, group_sizes, self.precision, state=state,
                                pow2_scale=state.pow2_scale if state is not None else False,
                                keep_transpose=state.keep_transpose if state is not None else True,
                                accumulate_main_grad=self.accumulate_main_grad, kernel=self.kernel, fallback=self.fallback)


class RMSNorm(nn.Module):
    """y[...,C] = h * rsqrt(mean(h^2) + eps) * weight[C], h = x; with residual or return_input, (y, h) (functional.rms_norm)."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, device=None, dtype=None, kernel: str = "auto",
                 fallback: str = "error"):
        super().__init__()
        self.eps, self.kernel, self.fallback = eps, kernel, fallback
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, return_input: bool = False):
        return F.rms_norm(x, self.weight, self.eps, residual=residual, return_input=return_input, kernel=self.kernel,
                          fallback=self.fallback)


class LayerNormLinear(nn.Module):
    """RMSNorm, then Linear. Parameters: layer_norm_weight[in], weight[out,in], bias[out] (as Megatron names them).

    In FP8 the normed tensor is quantised where it is made (functional.layer_norm_linear); results equal RMSNorm then Linear.
    forward(x[...,in]) -> y[...,out]. forward(x, residual=r[...,in]) -> (y, h[...,in]) with h = x + r, which is what is normed;
    forward(x, return_input=True) -> (y, h) with h = x. Going on with h in place of x, its gradient is added inside RMSNorm's
    backward.
    """

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, bias: bool = False, *, precision: str = "bf16",
                 device=None, dtype=None, accumulate_main_grad: bool = False, forward_accumulation: str = "fp32",
                 kernel: str = "auto", fallback: str = "error", **state_options):
        super().__init__()
        check_flags(bias=bias, accumulate_main_grad=accumulate_main_grad)
        check_features(in_features, out_features, precision)
        check_accumulation(forward_accumulation, precision)
        self.eps, self.precision, self.kernel, self.fallback = eps, precision, kernel, fallback
        self.accumulate_main_grad, self.forward_accumulation = accumulate_main_grad, forward_accumulation
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.state = make_state(precision, state_options, device)
        if self.weight.device.type != "meta":
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, eps={self.eps}, precision={self.precision}"

    def forward(self, x: torch.Tensor, row_mask: torch.Tensor | None = None, residual: torch.Tensor | None = None,
                return_input: bool = False):
        return F.layer_norm_linear(x, self.layer_norm_weight, self.weight, self.bias, self.eps, self.precision,
                                   residual=residual, return_input=return_input, state=self.state, row_mask=row_mask,
                                   **_call_options(self))


class LayerNormMLP(nn.Module):
    """RMSNorm, gate and up projection, SwiGLU, down projection: the MLP block of a llama without its residual.

    In FP8 the whole block is one call (functional.gated_mlp) that quantises each tensor where it is made. fc1 and fc2 hold the
    parameters; they are called one after the other, with the same results, where one of them was replaced, carries a bias or
    has hooks or a forward of its own (which only a call would run; FSDP2 gathers the weights of a layer of its own in one).
    forward(x[...,hidden]) -> y[...,hidden]; residual and return_input: as in LayerNormLinear. A decoder
    layer's second half is `out, h = mlp(attention_out, residual=x)`, then `h + out`.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, *, precision: str = "bf16", device=None,
                 dtype=None, accumulate_main_grad: bool = False, forward_accumulation: str = "fp32", kernel: str = "auto",
                 fallback: str = "error", **state_options):
        super().__init__()
        common = dict(precision=precision, device=device, dtype=dtype, accumulate_main_grad=accumulate_main_grad,
                      forward_accumulation=forward_accumulation, kernel=kernel, fallback=fallback, **state_options)
        self.fallback = fallback
        self.fc1 = LayerNormLinear(hidden_size, 2 * ffn_hidden_size, eps, **common)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias=False, **common)

    def forward(self, x: torch.Tensor, row_mask: torch.Tensor | None = None, residual: torch.Tensor | None = None,
                return_input: bool = False):
        fc1, fc2 = self.fc1, self.fc2
        if self._is_one_call():
            return F.gated_mlp(x, fc1.layer_norm_weight, fc1.weight, fc2.weight, fc1.eps, fc1.precision, residual=residual,
                               return_input=return_input, states=(fc1.state, fc2.state), row_mask=row_mask, **_call_options(fc1))
        if residual is None and not return_input:
            return fc2(F.swiglu(fc1(x, row_mask), fallback=self.fallback), row_mask)
        pair, h = fc1(x, row_mask, residual=residual, return_input=return_input)
        return fc2(F.swiglu(pair, fallback=self.fallback), row_mask), h

    def _is_one_call(self) -> bool:
        fc1, fc2 = self.fc1, self.fc2
        return (type(fc1) is LayerNormLinear and type(fc2) is Linear and fc1.bias is None and fc2.bias is None
                and fc1.precision == fc2.precision and _call_options(fc1) == _call_options(fc2)
                and not any(must_be_called(layer) for layer in (fc1, fc2)))


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def must_be_called(module: nn.Module) -> bool:
    """Whether only a call runs all that was put on a module: hooks, its own or those of all modules, or another forward."""
    return has_hooks(module) or "forward" in module.__dict__ or torch.nn.modules.module._has_any_global_hook()


class DotProductAttention(nn.Module):
    """Attention over packed segments; forward takes the tensors, the module holds the choices (see functional.attention)."""

    def __init__(self, *, mask: str = "causal", window: tuple[int | None, int | None] | None = None,
                 softmax_scale: float | None = None, precision: str = "bf16", dq_accumulation: str = "fp32",
                 deterministic: bool = False, kernel: str = "auto", fallback: str = "error"):
        super().__init__()
        check_flags(deterministic=deterministic)
        self.choices = dict(mask=mask, window=window, softmax_scale=softmax_scale, precision=precision,
                            dq_accumulation=dq_accumulation, deterministic=deterministic, kernel=kernel, fallback=fallback)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.choices.items())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **segments) -> torch.Tensor:
        """q[Tq,H,D], k[Tk,G,D], v[Tk,G,D], cu_seqlens_q=..., ... -> out[Tq,H,D]."""
        return F.attention(q, k, v, **segments, **self.choices)
