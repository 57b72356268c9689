"""Quantise the FP8 weights of a whole model together, in place of one cast in the first forward of every layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from te_plugin.torch.quantize_many import quantize_operands
from te_plugin.torch.state import LinearState


@dataclass(frozen=True)
class RefreshReport:
    """Names of the layers whose weight was quantised, and of those left to their own forward, with the reason.

    In a list of models they begin with the place in the list.
    """

    quantised: tuple[str, ...]
    left: dict[str, str]


def refresh_weights(model: nn.Module | Iterable[nn.Module]) -> RefreshReport:
    """Quantise every stale FP8 weight of a model in a few launches, and put it where the layers' forward looks for it.

    For layers with a `weight` and a LinearState in `state`: Linear, LayerNormLinear, LayerNormMLP, GroupedLinear and those of the
    Megatron adapter. Call it once a step, after the optimizer and before the first forward; it replaces no other call. Numbers,
    amax histories, scales and counters stay those of the lazy way, bit for bit: a layer that finds its weight quantised still
    records its amax at its own first use. Launches grow with the kinds of weights (dtype, device, recipe), not with their number.

    Left to the forward, which quantises them as ever, and named in the report: a layer that has not trained yet (its first
    forward says which copies it needs, and begins delayed scaling); weights that FSDP2 shards (DTensor: the whole weight exists
    within the layer's forward only); weight_cache=False. A graph of torch.compile quantises its weights itself and does not look
    at these copies: leave the call out where the whole model is compiled. Activation recompute sees the same copies. Weights must
    hold their values: where something fills them later, as Megatron's overlap_param_gather does in hooks of the forward, call it
    after that or not at all.
    """
    with torch.inference_mode(False), torch.no_grad():  # training saves the copies for its backward: no inference tensors
        return _refresh(model)


def _refresh(model: nn.Module | Iterable[nn.Module]) -> RefreshReport:
    groups, quantised, left = defaultdict(list), [], {}
    for name, layer in _fp8_layers(model):
        reason = _reason_to_leave(layer)
        if reason is not None:
            left[name] = reason
            continue
        state = layer.step_state() if hasattr(layer, "step_state") else layer.state  # Megatron's say there that a step begins
        state.begin(layer.weight)
        if not state.is_stale(layer.weight):
            continue
        state.drop_weight()  # before the new copies are made: both at once would not fit
        options, scale = state.cast_of("weight", state.keeps_transpose)
        groups[options, layer.weight.dtype, layer.weight.device].append((state, layer.weight, scale))
        quantised.append(name)
    for (options, *_), group in groups.items():
        states, weights, scales = zip(*group, strict=True)
        made = quantize_operands([weight.detach() for weight in weights], options, scales if options.delayed else None)
        for state, weight, one in zip(states, weights, made, strict=True):
            state.keep_weight(weight, one)
    return RefreshReport(tuple(quantised), left)


def _fp8_layers(model: nn.Module | Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every layer with FP8 state, once."""
    seen = set()
    for place, root in [("", model)] if isinstance(model, nn.Module) else ((str(i), part) for i, part in enumerate(model)):
        for name, module in root.named_modules(prefix=place):
            state, weight = getattr(module, "state", None), getattr(module, "weight", None)
            if isinstance(state, LinearState) and isinstance(weight, torch.Tensor) and id(state) not in seen:
                seen.add(id(state))
                yield name, module


def _reason_to_leave(layer: nn.Module) -> str | None:
    state = layer.state
    if not state.weight_cache:
        return "weight_cache=False: every forward quantises the weight"
    if hasattr(layer.weight, "placements"):  # a DTensor
        return "the weight is sharded, and whole within the layer's forward only"
    if state.keeps_transpose is None or state.needs_values("weight"):
        return "it has not trained yet outside torch.compile: its first forward says which copies it needs"
    return None
