"""FP8 enters through quant_recipe, reaches the layers it names, and nothing is accepted and ignored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import yaml
from megatron.core.quantization.quant_config import RecipeConfig
from megatron_models import build, mean_loss, packed_batch, small_config

from te_plugin import megatron as plugin
from te_plugin import numerics
from te_plugin.config import ConfigError

FP8 = [name for name in numerics.PRECISIONS if numerics.scaling(name)]


def transformer_config(**changes):
    cfg = small_config("layout=thd", "precision=bf16")
    plugin.initialize(cfg)
    return dataclasses.replace(plugin.transformer_config(cfg), **changes)


@pytest.mark.parametrize("precision", [p for p in FP8 if p != "fp8_block"])
def test_every_linear_reports_its_precision_and_fp8_differs_from_bf16(precision):
    batch = packed_batch([20, 31])
    model, reference = build("layout=thd", f"precision={precision}"), build("layout=thd", "precision=bf16")
    report = plugin.precision_report(model)
    assert len(report) == 2 * 4 and set(report.values()) == {precision}
    assert set(plugin.precision_report(reference).values()) == {"bf16"}
    fp8, bf16 = mean_loss(model, batch), mean_loss(reference, batch)
    assert fp8.item() != bf16.item()
    assert fp8.item() == pytest.approx(bf16.item(), rel=1e-2)
    fp8.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_fp32_parameters_report_fp32():
    assert set(plugin.precision_report(build("layout=thd")).values()) == {"fp32"}


def test_first_and_last_layers_stay_bf16():
    model = build("layout=thd", "precision=fp8_current", "model.num_layers=12", "precision.bf16_layers_at_start=2",
                  "precision.bf16_layers_at_end=1")
    by_layer = {int(name.split(".")[2]): set() for name in plugin.precision_report(model)}
    for name, precision in plugin.precision_report(model).items():
        by_layer[int(name.split(".")[2])].add(precision)
    # Layer 1 must not match layers 10 and 11.
    assert [by_layer[i] for i in range(12)] == [{"bf16"}] * 2 + [{"fp8_current"}] * 9 + [{"bf16"}]


def test_fast_accumulation_reaches_every_fp8_layer_and_no_bf16_layer():
    model = build("layout=thd", "precision=fp8_rowwise", "precision.forward_accumulation=fast", "precision.bf16_layers_at_end=1")
    found = {(module.precision.precision, module.call_options()["forward_accumulation"])
             for module in model.modules() if isinstance(module, plugin.ColumnParallelLinear | plugin.RowParallelLinear)}
    assert found == {("fp8_rowwise", "fast"), ("bf16", "fp32")}


def test_a_pipeline_stage_counts_bf16_layers_from_the_models_first():
    cfg = small_config("precision=fp8_current", "model.num_layers=4", "precision.bf16_layers_at_start=1",
                       "precision.bf16_layers_at_end=1")
    patterns = lambda recipe: [m.pattern for m in recipe.matchers if m.config_key == "high_precision"]
    assert patterns(plugin.quant_recipe(cfg)) == ["*decoder.layers.0.*", "*decoder.layers.3.*"]
    assert patterns(plugin.quant_recipe(cfg, first_layer=2, num_layers=2)) == ["*decoder.layers.1.*"]


@pytest.mark.parametrize("field", ["fp8", "fp4"])
def test_megatrons_own_fp8_switch_is_refused(field):
    """Without TransformerEngine Megatron accepts it and trains in BF16."""
    config = transformer_config()
    setattr(config, field, "hybrid" if field == "fp8" else "e2m1")
    with pytest.raises(ConfigError, match="quant_recipe"):
        plugin.layer_spec(config)


@pytest.mark.parametrize(("field", "value"), [
    ("gradient_accumulation_fusion", True), ("tp_comm_overlap", True), ("cpu_offloading", True), ("use_kitchen", True),
    ("normalization", "LayerNorm"), ("multi_latent_attention", True), ("layernorm_zero_centered_gamma", True)])
def test_settings_that_would_be_ignored_are_refused_by_name(field, value):
    config = transformer_config()
    setattr(config, field, value)
    with pytest.raises(ConfigError, match=field):
        plugin.layer_spec(config)


@pytest.mark.parametrize(("field", "report"), [
    ("first_last_layers_bf16", "https://github.com/radixark/miles/pull/614"),
    ("fp8_param", "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/233"),
    ("qk_l2_norm", "https://github.com/NVIDIA/Megatron-LM/pull/4067"),
    ("fp32_residual_connection", "https://github.com/NVIDIA/Megatron-LM/issues/1402"),
    ("fp8_dot_product_attention", None), ("fp8_multi_head_attention", None), ("batch_invariant_mode", None),
    ("disable_parameter_transpose_cache", None), ("activation_func_fp8_input_store", None)])
def test_switches_that_only_other_layers_read_are_refused(field, report):
    """report: where a specification or a library did not read the switch."""
    config = transformer_config()
    assert not getattr(config, field)
    setattr(config, field, True)
    with pytest.raises(ConfigError, match=field):
        plugin.layer_spec(config)


@pytest.mark.parametrize(("field", "value"), [
    ("attention_dropout", 0.1), ("context_parallel_size", 2), ("softmax_type", "learnable"), ("qk_clip", True),
    ("log_max_attention_logit", True)])
def test_core_attention_refuses_what_it_does_not_compute(field, value):
    from megatron.core.transformer.enums import AttnMaskType

    config = transformer_config()
    setattr(config, field, value)
    with pytest.raises(ConfigError, match=field):
        plugin.CoreAttention(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")


@pytest.mark.parametrize(("payload", "says"), [
    ({"te_plugin": {"precision": "fp8_curent"}}, "fp8_curent"),
    ({"te_plugin": {"precision": "fp8_current", "weight_cashe": "none"}}, "did you mean 'weight_cache'"),
    ({"te_plugin": {"weight_cache": "none"}}, "no precision given"),
    ({"te_plugin": {"precision": "fp8_current", "weight_cache": "sometimes"}}, "per_step, none"),
    ({"te_plugin": {"precision": "fp8_current", "keep_transpose": "off"}}, "must be true or false"),
    ({"te_plugin": {"precision": "fp8_current", "forward_accumulation": "bf16"}}, "is not one of fp32, fast"),
    ({"te_plugin": {"precision": "fp8_block", "forward_accumulation": "fast"}}, "precision=fp8_block: the sums of its blocks"),
    ({"transformer_engine_config_type": "TEQuantizationParams"}, "expected one key 'te_plugin'"),
    ({}, "expected one key 'te_plugin'"),
])
def test_a_payload_that_cannot_be_obeyed_is_an_error(payload, says):
    recipe = {"configs": {"mine": payload},
              "matchers": {"all": {"type": "glob", "enabled": True, "pattern": "*", "config": "mine"}}}
    linear = plugin.ColumnParallelLinear(64, 64, config=transformer_config(), init_method=torch.nn.init.zeros_)
    from megatron.core.quantization.utils import get_quant_config_or_none

    with pytest.raises(ConfigError, match=says):
        linear.finish_init(get_quant_config_or_none("decoder.layers.0.mlp.linear_fc1", RecipeConfig.from_config_dict(recipe)))


def test_a_yaml_recipe_of_the_command_line_reaches_the_layers(tmp_path):
    path = tmp_path / "fp8.yaml"
    path.write_text(yaml.safe_dump({
        "configs": {"fp8": {"te_plugin": {"precision": "fp8_current"}}, "bf16": {"te_plugin": {"precision": "bf16"}}},
        "matchers": {"first": {"type": "glob", "enabled": True, "pattern": "*layers.0.*", "config": "bf16"},
                     "mlp": {"type": "glob", "enabled": True, "pattern": "*linear_fc*", "config": "fp8"}}}))
    cfg = small_config("layout=thd", "precision=bf16")
    plugin.initialize(cfg)
    config = plugin.transformer_config(cfg)
    config.quant_recipe = RecipeConfig.from_yaml_file(str(path))
    report = plugin.precision_report(plugin.build_stage(cfg, config, "cpu", True, True))
    assert {name for name, precision in report.items() if precision == "fp8_current"} == {
        "decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"}


@pytest.mark.report("NVIDIA/TransformerEngine#688")
def test_a_feature_size_that_fp8_cannot_take_is_named_alone():
    precision = plugin.LinearPrecision("fp8_current")
    with pytest.raises(ConfigError) as error:
        precision.check_features("linear_fc1", 767, 3072)
    assert "767" in str(error.value) and "16" in str(error.value) and "3072" not in str(error.value)


def test_fp8_that_reached_no_layer_is_an_error():
    cfg = small_config("layout=thd", "precision=fp8_current")
    plugin.initialize(cfg)
    config = plugin.transformer_config(cfg)
    config.quant_recipe = None
    with pytest.raises(ConfigError, match="reached no linear layer"):
        plugin.build_stage(cfg, config, "cpu", True, True)
