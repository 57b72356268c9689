"""Modules for torch on top of functional.py. They know nothing of parallelism; adapters add it."""

from __future__ import annotations

import math

import torch
from torch import nn

from te_plugin import numerics
from te_plugin.ops.linear_checks import check_features
from te_plugin.torch import functional as F
from te_plugin.torch.state import LinearState


def _make_state(precision: str, options: dict) -> LinearState | None:
    if numerics.scaling(precision) is None:
        if options:
            raise ValueError(f"{', '.join(options)}: precision {precision} has no FP8 state, so these options do nothing")
        return None
    return LinearState(precision, **options)


class Linear(nn.Module):
    """y[...,out] = x[...,in] W^T + b in a given precision, with a weight cache and (fp8_delayed) amax histories.

    state_options: weight_cache, keep_transpose, pow2_scale, history_len, amax_compute (see LinearState).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, precision: str = "bf16", device=None,
                 dtype=None, kernel: str = "auto", fallback: str = "error", **state_options):
        super().__init__()
        check_features(in_features, out_features, precision)
        self.in_features, self.out_features, self.precision = in_features, out_features, precision
        self.kernel, self.fallback = kernel, fallback
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.state = _make_state(precision, state_options)
        if self.weight.device.type != "meta":
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, precision={self.precision}"

    def forward(self, x: torch.Tensor, row_mask: torch.Tensor | None = None) -> torch.Tensor:
        state = self.state
        return F.linear(x, self.weight, self.bias, self.precision, state=state, row_mask=row_mask,
                        pow2_scale=state.pow2_scale if state is not None else False,
                        keep_transpose=state.keep_transpose if state is not None else True,
                        kernel=self.kernel, fallback=self.fallback)


class GroupedLinear(nn.Module):
    """One weight[out,in] an expert; forward(x[M,in], group_sizes[E]) -> [M,out].

    state_options: weight_cache, keep_transpose, pow2_scale (see LinearState); fp8_delayed is refused (a history per tensor).
    """

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, precision: str = "bf16", device=None, dtype=None,
                 kernel: str = "auto", fallback: str = "error", **state_options):
        super().__init__()
        check_features(in_features, out_features, precision)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.precision, self.kernel, self.fallback = precision, kernel, fallback
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        self.state = _make_state(precision, state_options)
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
                                kernel=self.kernel, fallback=self.fallback)


class RMSNorm(nn.Module):
    """y[...,C] = x * rsqrt(mean(x^2) + eps) * weight[C]."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, device=None, dtype=None, kernel: str = "auto",
                 fallback: str = "error"):
        super().__init__()
        self.eps, self.kernel, self.fallback = eps, kernel, fallback
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight, self.eps, kernel=self.kernel, fallback=self.fallback)


class LayerNormLinear(nn.Module):
    """RMSNorm, then Linear. Parameters: layer_norm_weight[in], weight[out,in], bias[out] (as Megatron names them)."""

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, bias: bool = False, *, precision: str = "bf16",
                 device=None, dtype=None, kernel: str = "auto", fallback: str = "error", **state_options):
        super().__init__()
        check_features(in_features, out_features, precision)
        self.eps, self.precision, self.kernel, self.fallback = eps, precision, kernel, fallback
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.state = _make_state(precision, state_options)
        if self.weight.device.type != "meta":
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: torch.Tensor, row_mask: torch.Tensor | None = None) -> torch.Tensor:
        normed = F.rms_norm(x, self.layer_norm_weight, self.eps, fallback=self.fallback)
        state = self.state
        return F.linear(normed, self.weight, self.bias, self.precision, state=state, row_mask=row_mask,
                        pow2_scale=state.pow2_scale if state is not None else False,
                        keep_transpose=state.keep_transpose if state is not None else True,
                        kernel=self.kernel, fallback=self.fallback)


class LayerNormMLP(nn.Module):
    """RMSNorm, gate and up projection, SwiGLU, down projection: the MLP block of a llama without its residual."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, *, precision: str = "bf16", device=None,
                 dtype=None, kernel: str = "auto", fallback: str = "error", **state_options):
        super().__init__()
        common = dict(precision=precision, device=device, dtype=dtype, kernel=kernel, fallback=fallback, **state_options)
        self.fallback = fallback
        self.fc1 = LayerNormLinear(hidden_size, 2 * ffn_hidden_size, eps, **common)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias=False, **common)

    def forward(self, x: torch.Tensor, row_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.fc2(F.swiglu(self.fc1(x, row_mask), fallback=self.fallback), row_mask)


class DotProductAttention(nn.Module):
    """Attention over packed segments; forward takes the tensors, the module holds the choices (see functional.attention)."""

    def __init__(self, *, mask: str = "causal", window: tuple[int | None, int | None] | None = None,
                 softmax_scale: float | None = None, precision: str = "bf16", dq_accumulation: str = "fp32",
                 deterministic: bool = False, kernel: str = "auto", fallback: str = "error"):
        super().__init__()
        self.choices = dict(mask=mask, window=window, softmax_scale=softmax_scale, precision=precision,
                            dq_accumulation=dq_accumulation, deterministic=deterministic, kernel=kernel, fallback=fallback)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.choices.items())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **segments) -> torch.Tensor:
        """q[Tq,H,D], k[Tk,G,D], v[Tk,G,D], cu_seqlens_q=..., ... -> out[Tq,H,D]."""
        return F.attention(q, k, v, **segments, **self.choices)
