"""The peers of the layer benchmark: torch compiled, and torchao and TransformerEngine where they are importable."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import nn

from te_plugin.bench.layer_models import Attend, Inputs, TorchLayer, fill, split_heads, train_call

Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def peers(inputs: Inputs, attend: Attend) -> Iterator[tuple[str, Call]]:
    """(name, call) of every peer of this machine that runs; one that does not is named with its reason."""
    for library, make in {"torch": _torch, "torchao": _torchao, "transformer_engine": _transformer_engine}.items():
        if not importlib.util.find_spec(library):
            continue
        try:
            for name, call in make(inputs, attend):
                call()
                yield name, call
        except Exception as error:  # somebody else's code: our rows must not be lost with it
            reason = (str(error).splitlines() or [""])[0]
            print(f"peer {library} is left out: {type(error).__name__}: {reason}", flush=True)


def _torch(inputs: Inputs, attend: Attend) -> Iterator[tuple[str, Call]]:
    layer = TorchLayer(inputs, attend)
    yield "torch bf16 compile", train_call(torch.compile(layer), layer.parameters(), inputs)


def _torchao(inputs: Inputs, attend: Attend) -> Iterator[tuple[str, Call]]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for recipe in ("tensorwise", "rowwise"):
        layer = TorchLayer(inputs, attend)
        convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
        yield f"torchao {recipe} compile", train_call(torch.compile(layer), layer.parameters(), inputs)


def _transformer_engine(inputs: Inputs, attend: Attend) -> Iterator[tuple[str, Call]]:
    from transformer_engine.common import recipe

    recipes = {"bf16": None, "delayed": recipe.DelayedScaling(), "current": recipe.Float8CurrentScaling(),
               "block": recipe.Float8BlockScaling()}
    for name, chosen in recipes.items():
        layer = _EngineLayer(inputs, attend, chosen)
        yield f"TransformerEngine {name}", train_call(layer, layer.parameters(), inputs)


class _EngineLayer(nn.Module):
    """TransformerEngine's fused modules; weights are cast in the first call and cached from then on. RoPE is compiled torch."""

    def __init__(self, inputs: Inputs, attend: Attend, recipe):
        import transformer_engine.pytorch as te

        super().__init__()
        sizes, w = inputs.sizes, inputs.weights
        self.te, self.sizes, self.attend, self.recipe, self.first = te, sizes, attend, recipe, True
        common = dict(bias=False, params_dtype=torch.bfloat16, device=inputs.x.device)
        self.qkv = te.LayerNormLinear(sizes.hidden, sizes.qkv, eps=sizes.eps, normalization="RMSNorm", **common)
        self.proj = te.Linear(sizes.heads * sizes.dim, sizes.hidden, **common)
        self.mlp = te.LayerNormMLP(sizes.hidden, sizes.ffn, eps=sizes.eps, normalization="RMSNorm", activation="swiglu", **common)
        fill((self.qkv.layer_norm_weight, w["norm1"]), (self.qkv.weight, w["qkv"]), (self.proj.weight, w["proj"]),
             (self.mlp.layer_norm_weight, w["norm2"]), (self.mlp.fc1_weight, w["fc1"]), (self.mlp.fc2_weight, w["fc2"]))
        angle = inputs.positions.float()[:, None, None] * inputs.inv_freq
        cos, sin = angle.cos(), angle.sin()

        def rope(x):
            a, b = x.float().chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

        self.rope = torch.compile(rope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = None if self.recipe is None else self.first
        self.first = False
        with self.te.fp8_autocast(enabled=self.recipe is not None, fp8_recipe=self.recipe):
            q, k, v = split_heads(self.qkv(x, is_first_microbatch=first), self.sizes)
            attended = self.attend(self.rope(q), self.rope(k), v).flatten(1)
            x = x + self.proj(attended, is_first_microbatch=first)
            return x + self.mlp(x, is_first_microbatch=first)
