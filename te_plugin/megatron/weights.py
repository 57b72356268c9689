"""Megatron's parameters from weights by their common names, and back.

The common names are Hugging Face's (te_plugin.weights). Megatron keeps q, k and v of one group side by side in linear_qkv,
stacks gate on up in linear_fc1, and splits both over tensor-parallel ranks. `fill` handles every split: tensor parallel,
pipeline stages (layers are counted from the model's first), expert parallel, and FSDP2 (DTensor).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from te_plugin.importing import ImportedWeights, is_weights_folder
from te_plugin.megatron.arguments import take_shard
from te_plugin.megatron.linear import PrecisionLayer
from te_plugin.weights import initial_value, llama_weights

Source = Callable[[str], np.ndarray | torch.Tensor]
_PLAIN = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight",
          "decoder.final_layernorm.weight": "model.norm.weight"}
_LAYER = {"input_layernorm.weight": "input_layernorm.weight", "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
          "pre_mlp_layernorm.weight": "post_attention_layernorm.weight", "mlp.linear_fc2.weight": "mlp.down_proj.weight",
          "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
          "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
          "mlp.router.weight": "block_sparse_moe.gate.weight"}


@torch.no_grad()
def fill(model: torch.nn.Module, model_config, source: Source) -> None:
    """Set every parameter of a GPTModel (or one pipeline stage of it) from full weights by common name.

    model_config: config.ModelConfig. source(name) -> the full weight [out, in], any float dtype. A parameter that no common
    name covers is an error: nothing stays uninitialised. Shapes are checked.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TransformerLayer)}
    for name, parameter in model.named_parameters():
        full = _full(_clean(name), layers_of(layers, name), model_config, source)
        full = _local_experts(full, parameter)
        dim = getattr(parameter, "partition_dim", -1)
        if getattr(parameter, "tensor_model_parallel", False) and dim >= 0:
            group = _tp_group(model, name)
            full = take_shard(full, dim, parameter.partition_stride, group.rank(), group.size())
        if full.shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, its weight gives {tuple(full.shape)}")
        _assign(parameter, full)


def initialise(model: torch.nn.Module, cfg) -> None:
    """Initial weights of a run (config.Config): imported ones where run.init_from names a folder of import-hf, otherwise a
    pure function of cfg.run.seed and each weight's name.
    """
    if cfg.run.init_from is not None and is_weights_folder(cfg.run.init_from):
        imported = ImportedWeights(cfg.run.init_from)
        imported.check(cfg.model)
        fill(model, cfg.model, imported.torch_source())
        return
    known = llama_weights(cfg.model, cfg.moe.num_experts, cfg.moe.ffn_hidden_size)
    fill(model, cfg.model, lambda name: initial_value(known[name], cfg.run.seed))


def common_weights(model: torch.nn.Module, model_config) -> Iterator[tuple[str, torch.Tensor]]:
    """(common name, full weight) of a model that no tensor, pipeline or expert parallelism splits; views where possible."""
    heads, groups, head_dim = model_config.num_heads, model_config.num_kv_heads, model_config.head_dim
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False) and _tp_group(model, name).size() > 1:
            raise ValueError(f"{name} is split over tensor-parallel ranks; gather it first (use a distributed checkpoint)")
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        name = _clean(name)
        if name in _PLAIN:
            yield _PLAIN[name], value
            continue
        prefix, part = _layer_and_part(name)
        if part in _LAYER:
            yield prefix + _LAYER[part], value
        elif part == "self_attention.linear_qkv.weight":
            grouped = value.view(groups, heads // groups + 2, head_dim, -1)
            for key, rows in (("q", grouped[:, :-2]), ("k", grouped[:, -2]), ("v", grouped[:, -1])):
                yield f"{prefix}self_attn.{key}_proj.weight", rows.reshape(-1, value.shape[1])
        elif part == "mlp.linear_fc1.weight":
            for key, rows in zip(("gate", "up"), value.chunk(2), strict=True):
                yield f"{prefix}mlp.{key}_proj.weight", rows
        else:
            yield from _common_experts(prefix, part, value)


def layers_of(layers: dict, name: str) -> TransformerLayer | None:
    return next((layer for prefix, layer in layers.items() if name.startswith(prefix + ".")), None)


def _clean(name: str) -> str:
    """Without the prefixes that wrappers (Float16Module, DDP, torch.compile) add."""
    return re.sub(r"^(module\.|_orig_mod\.)+", "", name).replace("._orig_mod.", ".")


def _layer_and_part(name: str, layer: int | None = None) -> tuple[str, str]:
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise ValueError(f"parameter {name} has no common name: this is not a llama built by layer_spec")
    return f"model.layers.{match[1] if layer is None else layer}.", match[2]


def _full(name: str, layer: TransformerLayer | None, model_config, source: Source) -> torch.Tensor:
    """The full weight of a Megatron parameter, before any split; experts as [E, out, in]."""
    get = lambda key: torch.as_tensor(source(key))
    if name in _PLAIN:
        return get(_PLAIN[name])
    prefix, part = _layer_and_part(name, None if layer is None else layer.layer_number - 1)
    if part in _LAYER:
        return get(prefix + _LAYER[part])
    if part == "self_attention.linear_qkv.weight":
        groups, head_dim = model_config.num_kv_heads, model_config.head_dim
        q, k, v = (get(f"{prefix}self_attn.{key}_proj.weight") for key in "qkv")
        hidden = q.shape[1]
        return torch.cat([x.reshape(groups, -1, head_dim, hidden) for x in (q, k, v)], 1).reshape(-1, hidden)
    if part == "mlp.linear_fc1.weight":
        return torch.cat([get(prefix + "mlp.gate_proj.weight"), get(prefix + "mlp.up_proj.weight")])
    return _expert_full(prefix, part, layer, get)


def _expert_full(prefix: str, part: str, layer, get) -> torch.Tensor:
    match = re.fullmatch(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.weight", part)
    if match is None or layer is None or not isinstance(layer.mlp, MoELayer):
        raise ValueError(f"parameter {prefix}{part} has no common name: this is not a llama built by layer_spec")
    local = layer.mlp.local_expert_indices
    experts = local if match[1] is None else [local[int(match[1])]]
    if match[2] == "1":
        made = [torch.cat([get(f"{prefix}block_sparse_moe.experts.{e}.{w}.weight") for w in ("w1", "w3")]) for e in experts]
    else:
        made = [get(f"{prefix}block_sparse_moe.experts.{e}.w2.weight") for e in experts]
    return torch.stack(made) if match[1] is None else made[0]


def _common_experts(prefix: str, part: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    match = re.fullmatch(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.weight", part)
    if match is None:
        raise ValueError(f"parameter {prefix}{part} has no common name: this is not a llama built by layer_spec")
    experts = enumerate(value) if match[1] is None else [(int(match[1]), value)]
    for expert, matrix in experts:
        names = ("w1", "w3") if match[2] == "1" else ("w2",)
        for key, rows in zip(names, matrix.chunk(len(names)), strict=True):
            yield f"{prefix}block_sparse_moe.experts.{expert}.{key}.weight", rows


def _local_experts(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return full if full.dim() == parameter.dim() else full.reshape(parameter.shape)


def _tp_group(model: torch.nn.Module, name: str):
    module = model.get_submodule(name.rpartition(".")[0])
    group = getattr(module, "tp_group", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return group


def _assign(parameter: torch.nn.Parameter, full: torch.Tensor) -> None:
    """Copy into a parameter; a DTensor takes its own shard (every rank computed the same full weight: no communication)."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        full = full.to(device=parameter.to_local().device, dtype=parameter.dtype)
        parameter.to_local().copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements,
                                                     src_data_rank=None).to_local())
    else:
        parameter.copy_(full)


def materialise(model: torch.nn.Module, cfg, device: torch.device | str) -> None:
    """Give a model that was built on "meta" (and perhaps sharded since) storage on `device`, and its initial weights.

    `to_empty` replaces parameters and forgets their attributes, by which Megatron knows what is split how: they are kept.
    """
    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes[name])
    with torch.device(device):
        for module in model.modules():
            if isinstance(module, PrecisionLayer):
                module.reset_state()
    initialise(model, cfg)
