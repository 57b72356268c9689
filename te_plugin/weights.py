"""Which weights a llama has, and their initial values. Framework-free: every adapter starts from the same numbers.

Names and shapes are those of Hugging Face checkpoints (llama; Mixtral for mixture of experts), matrices are [out, in].
A value depends on the seed and the name of its weight only. So it is the same for every adapter, every way of splitting the
model over processes, every feature toggle, and whatever the order in which weights are asked for.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Weight:
    """A weight by its common name. std: standard deviation of its initial normal values; None: it starts as ones."""

    name: str
    shape: tuple[int, ...]
    std: float | None


def llama_weights(model, num_experts: int = 0, expert_ffn_hidden_size: int = 0) -> dict[str, Weight]:
    """All weights of a model by name. `model` is a config.ModelConfig; num_experts 0 means a dense model.

    Projections back into the residual stream (o_proj, down_proj) start smaller by sqrt(2 * layers), as in GPT-2.
    """
    hidden, heads, groups, head_dim = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    std = model.init_std
    residual_std = std / math.sqrt(2 * model.num_layers)
    weights = [Weight("model.embed_tokens.weight", (model.vocab_size, hidden), std)]
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        weights += [
            Weight(prefix + "input_layernorm.weight", (hidden,), None),
            Weight(prefix + "self_attn.q_proj.weight", (heads * head_dim, hidden), std),
            Weight(prefix + "self_attn.k_proj.weight", (groups * head_dim, hidden), std),
            Weight(prefix + "self_attn.v_proj.weight", (groups * head_dim, hidden), std),
            Weight(prefix + "self_attn.o_proj.weight", (hidden, heads * head_dim), residual_std),
            Weight(prefix + "post_attention_layernorm.weight", (hidden,), None),
        ]
        if num_experts == 0:
            weights += _mlp(prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"), hidden, model.ffn_hidden_size, std,
                            residual_std)
            continue
        weights.append(Weight(prefix + "block_sparse_moe.gate.weight", (num_experts, hidden), std))
        for expert in range(num_experts):
            weights += _mlp(f"{prefix}block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2"), hidden,
                            expert_ffn_hidden_size or model.ffn_hidden_size, std, residual_std)
    weights.append(Weight("model.norm.weight", (hidden,), None))
    if not model.tie_embeddings:
        weights.append(Weight("lm_head.weight", (model.vocab_size, hidden), std))
    return {weight.name: weight for weight in weights}


def _mlp(prefix: str, names: tuple[str, str, str], hidden: int, ffn: int, std: float, residual_std: float) -> list[Weight]:
    gate, up, down = names
    return [Weight(f"{prefix}{gate}.weight", (ffn, hidden), std), Weight(f"{prefix}{up}.weight", (ffn, hidden), std),
            Weight(f"{prefix}{down}.weight", (hidden, ffn), residual_std)]


def initial_value(weight: Weight, seed: int) -> np.ndarray:
    """float32 array of weight.shape: ones, or normal values drawn from a generator keyed by (seed, name)."""
    if weight.std is None:
        return np.ones(weight.shape, dtype=np.float32)
    digest = hashlib.blake2b(f"{seed}/{weight.name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))
    values = generator.standard_normal(weight.shape, dtype=np.float32)
    values *= np.float32(weight.std)
    return values
