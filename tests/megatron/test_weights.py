"""Initial weights are a pure function of the seed and the weight's name; common names map to Megatron's and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron_models import build, mean_loss, packed_batch, small_config

from te_plugin import megatron as plugin
from te_plugin.training.optimizer import stored_parameters
from te_plugin.weights import Weight, initial_value, llama_weights

TOGGLES = [("layout=bshd",), ("precision=bf16",), ("precision=fp8_current",), ("attention=composite",),
           ("precision.weight_cache=none", "precision=fp8_current"), ("run.fallback=allow",)]


GOLDEN = [[-0.5725926, 1.6276287], [-0.2747027, 0.0450731]]


def test_values_depend_on_seed_and_name_only():
    weight = Weight("model.layers.0.mlp.up_proj.weight", (8, 4), 0.02)
    assert np.array_equal(initial_value(weight, 7), initial_value(weight, 7))
    assert not np.array_equal(initial_value(weight, 7), initial_value(weight, 8))
    assert not np.array_equal(initial_value(weight, 7), initial_value(Weight("other", (8, 4), 0.02), 7))


def test_values_are_frozen():
    """A golden curve starts here: a change of generator or key would move every recorded run."""
    values = initial_value(Weight("lm_head.weight", (2, 2), 1.0), 1234)
    assert values.tolist() == [[pytest.approx(v, abs=1e-6) for v in row] for row in GOLDEN]


def test_values_have_the_standard_deviation_asked_for():
    values = initial_value(Weight("w", (512, 512), 0.02), 0)
    assert values.dtype == np.float32
    assert abs(values.mean()) < 2e-4 and values.std() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("toggle", TOGGLES, ids=[t[0] for t in TOGGLES])
def test_every_feature_toggle_starts_from_the_same_weights(toggle):
    reference, model = build("layout=thd"), build(*(("layout=thd",) if "layout" not in toggle[0] else ()), *toggle)
    for (name, a), (other, b) in zip(stored_parameters(reference), stored_parameters(model), strict=True):
        assert name == other and torch.equal(a.to(b.dtype), b)


def test_grouped_and_sequential_experts_start_from_the_same_weights():
    cfg = small_config("moe=tiny", "moe.ffn_hidden_size=96")
    made = [dict(plugin.common_weights(build("moe=tiny", "moe.ffn_hidden_size=96", f"moe.grouped_gemm={grouped}"), cfg.model))
            for grouped in ("true", "false")]
    assert set(made[0]) == set(made[1])
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@pytest.mark.parametrize("overrides", [(), ("moe=tiny", "moe.ffn_hidden_size=96"), ("model.tie_embeddings=true",),
                                       ("model.num_kv_heads=1",), ("model.num_kv_heads=4",)])
def test_common_names_cover_the_model_and_survive_the_way_through_megatron(overrides):
    cfg = small_config(*overrides)
    known = llama_weights(cfg.model, cfg.moe.num_experts, cfg.moe.ffn_hidden_size)
    weights = dict(plugin.common_weights(build(*overrides), cfg.model))
    assert set(weights) == set(known)
    for name, weight in known.items():
        assert torch.equal(weights[name], torch.from_numpy(initial_value(weight, cfg.run.seed))), name


def test_a_missing_or_misshapen_weight_is_an_error():
    cfg = small_config()
    model = build()
    with pytest.raises(KeyError):
        plugin.fill(model, cfg.model, {}.__getitem__)
    wrong = {name: np.zeros((*w.shape[:-1], w.shape[-1] * 2), np.float32) for name, w in llama_weights(cfg.model).items()}
    with pytest.raises(ValueError, match="has shape"):
        plugin.fill(model, cfg.model, wrong.__getitem__)


def test_a_model_built_without_storage_is_filled_after_it_was_placed():
    cfg = small_config("layout=thd")
    plugin.initialize(cfg)
    model = plugin.build_gpt(cfg, "meta")
    assert all(p.is_meta for p in model.parameters())
    attributes = {name: dict(vars(p)) for name, p in model.named_parameters()}
    plugin.materialise(model, cfg, "cpu")
    reference = build("layout=thd")
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert vars(a) == attributes[name] == vars(b), name


def test_experts_built_without_storage_are_filled_too():
    overrides = ("layout=thd", "moe=tiny", "moe.ffn_hidden_size=96", "precision=fp8_current")
    cfg = small_config(*overrides)
    plugin.initialize(cfg)
    model, reference = plugin.build_gpt(cfg, "meta"), build(*overrides)
    plugin.materialise(model, cfg, "cpu")
    batch = packed_batch([20, 12])
    assert torch.equal(mean_loss(model, batch), mean_loss(reference, batch))


def test_delayed_scaling_starts_afresh_in_a_model_built_without_storage():
    cfg = small_config("layout=thd", "precision=fp8_delayed")
    plugin.initialize(cfg)
    model = plugin.build_gpt(cfg, "meta")
    plugin.materialise(model, cfg, "cpu")
    scales = [value for name, value in model.state_dict().items() if name.endswith("delayed.scale")]
    assert len(scales) == 8 and all(torch.equal(scale, torch.ones_like(scale)) for scale in scales)
