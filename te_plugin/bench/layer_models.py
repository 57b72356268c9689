"""One llama decoder layer, T tokens, forward and backward: ours, torch's, and the FP32 reference.

Legend: T tokens, H query heads, G kv heads, D head dim, C hidden, F ffn. Every candidate gets the same weights and the same
attention function (q[T,H,D], k[T,G,D], v[T,G,D]) -> [T,H,D], so that differences are those of linear layers, norms and casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import te_plugin.torch as tp
from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.plan import plan
from te_plugin.torch.call import target_of

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layer; the defaults are llama3.1-8B's."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    eps: float = 1e-5
    theta: float = 500000.0

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    def __str__(self) -> str:
        return f"C{self.hidden} F{self.ffn} H{self.heads} G{self.kv_heads} D{self.dim}"


@dataclass(frozen=True)
class Inputs:
    """Weights of one layer, x and dy, positions; random, from a fixed seed, BF16."""

    sizes: Sizes
    lengths: tuple[int, ...]
    weights: dict[str, torch.Tensor]
    x: torch.Tensor
    dy: torch.Tensor
    cu: torch.Tensor
    positions: torch.Tensor
    inv_freq: torch.Tensor

    @classmethod
    def make(cls, sizes: Sizes, lengths: tuple[int, ...], device: torch.device) -> Inputs:
        generator = torch.Generator(device).manual_seed(1234)
        tokens = sum(lengths)

        def random(*shape, std=1.0):
            return (torch.randn(*shape, generator=generator, device=device) * std).bfloat16()

        weights = {
            "norm1": 1 + random(sizes.hidden, std=0.1), "qkv": random(sizes.qkv, sizes.hidden, std=0.02),
            "proj": random(sizes.hidden, sizes.heads * sizes.dim, std=0.02), "norm2": 1 + random(sizes.hidden, std=0.1),
            "fc1": random(2 * sizes.ffn, sizes.hidden, std=0.02), "fc2": random(sizes.hidden, sizes.ffn, std=0.02),
        }
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
        exponent = torch.arange(0, sizes.dim, 2, device=device, dtype=torch.float32) / sizes.dim
        return cls(sizes, lengths, weights, random(tokens, sizes.hidden), random(tokens, sizes.hidden), cu,
                   tp.positions_of(cu, tokens), 1 / sizes.theta ** exponent)


def attention_kernel(inputs: Inputs) -> str:
    """The attention kernel that the plan takes on the device of the inputs."""
    sizes, tokens = inputs.sizes, inputs.x.shape[0]
    problem = AttentionProblem(tokens, tokens, len(inputs.lengths), sizes.heads, sizes.kv_heads, sizes.dim, needs_backward=True)
    return plan(problem, target_of(inputs.x.device)).kernel.name


def planned_attention(inputs: Inputs, kernel: str) -> Attend:
    return lambda q, k, v: tp.attention(q, k, v, cu_seqlens_q=inputs.cu, kernel=kernel)


def split_heads(qkv: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    return qkv.view(qkv.shape[0], sum(heads), sizes.dim).split(heads, dim=1)


class OurLayer(nn.Module):
    """te_plugin.torch modules. options: precision and forward_accumulation of all linear layers."""

    def __init__(self, inputs: Inputs, attend: Attend, **options: str):
        super().__init__()
        sizes, device = inputs.sizes, inputs.x.device
        self.inputs, self.attend = inputs, attend
        common = dict(device=device, dtype=torch.bfloat16, **options)
        self.qkv = tp.LayerNormLinear(sizes.hidden, sizes.qkv, sizes.eps, **common)
        self.proj = tp.Linear(sizes.heads * sizes.dim, sizes.hidden, bias=False, **common)
        self.mlp = tp.LayerNormMLP(sizes.hidden, sizes.ffn, sizes.eps, **common)
        w = inputs.weights
        fill((self.qkv.layer_norm_weight, w["norm1"]), (self.qkv.weight, w["qkv"]), (self.proj.weight, w["proj"]),
             (self.mlp.fc1.layer_norm_weight, w["norm2"]), (self.mlp.fc1.weight, w["fc1"]), (self.mlp.fc2.weight, w["fc2"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = self.inputs.sizes
        qkv, x = self.qkv(x, return_input=True)
        q, k, v = tp.qkv_rope(qkv, self.inputs.positions, heads=sizes.heads, kv_heads=sizes.kv_heads,
                              inv_freq=self.inputs.inv_freq)
        out, x = self.mlp(self.proj(self.attend(q, k, v).flatten(1)), residual=x)
        return x + out


class TorchLayer(nn.Module):
    """Plain torch, to be compiled."""

    def __init__(self, inputs: Inputs, attend: Attend, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        sizes = inputs.sizes
        self.sizes, self.attend = sizes, attend
        angle = inputs.positions.float()[:, None, None] * inputs.inv_freq
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.norm1, self.norm2 = (nn.Parameter(inputs.weights[name].to(dtype)) for name in ("norm1", "norm2"))
        shapes = {"qkv": (sizes.hidden, sizes.qkv), "proj": (sizes.heads * sizes.dim, sizes.hidden),
                  "fc1": (sizes.hidden, 2 * sizes.ffn), "fc2": (sizes.ffn, sizes.hidden)}
        self.linears = nn.ModuleDict({name: nn.Linear(*shape, bias=False, device=inputs.x.device, dtype=dtype)
                                      for name, shape in shapes.items()})
        fill(*((self.linears[name].weight, inputs.weights[name]) for name in shapes))

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes, linears = self.sizes, self.linears
        q, k, v = split_heads(linears["qkv"](F.rms_norm(x, (sizes.hidden,), self.norm1, sizes.eps)), sizes)
        x = x + linears["proj"](self.attend(self.rope(q), self.rope(k), v).flatten(1))
        gate, up = linears["fc1"](F.rms_norm(x, (sizes.hidden,), self.norm2, sizes.eps)).chunk(2, -1)
        return x + linears["fc2"](F.silu(gate) * up)


def fill(*pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in pairs:
            parameter.copy_(value)


def train_call(layer: Callable[[torch.Tensor], torch.Tensor], parameters, inputs: Inputs) -> Callable[[], tuple]:
    """One forward, dgrad and wgrad: () -> (y, dx). Gradients are fresh tensors; nothing accumulates, no optimizer."""
    x, parameters = inputs.x.detach().requires_grad_(), [p for p in parameters if p.requires_grad]

    def call():
        y = layer(x)
        return y.detach(), torch.autograd.grad(y, (x, *parameters), inputs.dy)[0]

    return call


def reference(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, dx) of the layer in FP32, segment by segment through torch's attention."""
    def attend(q, k, v):
        group, parts = q.shape[1] // k.shape[1], []
        for q_part, k_part, v_part in zip(*(t.split(inputs.lengths) for t in (q, k, v)), strict=True):
            wide = (k_part.repeat_interleave(group, 1), v_part.repeat_interleave(group, 1))
            out = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q_part, *wide)), is_causal=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    layer = TorchLayer(inputs, attend, torch.float32)
    x = inputs.x.float().requires_grad_()
    y = layer(x)
    return y.detach(), torch.autograd.grad(y, x, inputs.dy.float())[0]


def ours(inputs: Inputs, attend: Attend,
         candidates: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Callable[[], tuple]]]:
    for name, options in candidates.items():
        layer = OurLayer(inputs, attend, **options)
        yield name, train_call(layer, layer.parameters(), inputs)
