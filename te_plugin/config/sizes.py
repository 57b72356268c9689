"""How large a model is, from its configuration alone."""

from __future__ import annotations

from te_plugin.config.schema import Config


def parameter_count(cfg: Config) -> tuple[int, int]:
    """(all parameters, those of linear layers inside the transformer layers)."""
    m, moe = cfg.model, cfg.moe
    attention = m.hidden_size * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim + m.num_heads * m.head_dim * m.hidden_size
    mlp = 3 * m.hidden_size * m.ffn_hidden_size
    router = 0
    if moe.num_experts:
        mlp = moe.num_experts * 3 * m.hidden_size * moe.ffn_hidden_size
        router = moe.num_experts * m.hidden_size
    linear = m.num_layers * (attention + mlp)
    embeddings = m.vocab_size * m.hidden_size * (1 if m.tie_embeddings else 2)
    return linear + m.num_layers * (router + 2 * m.hidden_size) + m.hidden_size + embeddings, linear
