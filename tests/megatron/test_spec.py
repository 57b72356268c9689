"""The layer specification as Megatron-LM uses it: --spec te_plugin.megatron layer_spec."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron_models import build, packed_batch, small_config

from te_plugin import megatron as plugin
from te_plugin.config import ConfigError
from te_plugin.torch.batch import to_device


def transformer(**changes):
    cfg = small_config(*[f"{k}={v}" for k, v in changes.items()])
    plugin.initialize(cfg)
    return plugin.transformer_config(cfg)


def test_the_specification_is_found_by_module_and_name():
    """Megatron-LM imports args.spec[0] and takes the attribute args.spec[1]."""
    made = importlib.import_module("te_plugin.megatron").layer_spec(transformer(), vp_stage=None)
    assert isinstance(made, TransformerBlockSubmodules)
    assert len(made.layer_specs) == 2 and made.layer_norm.func is plugin.RMSNorm


def test_megatron_lms_own_model_builder_builds_and_runs_it():
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    config = dataclasses.replace(transformer(), perform_initialization=True)
    wrapped = GPTModelConfig(transformer=config, transformer_layer_spec=plugin.rope_layer_spec, vocab_size=128, seq_length=64,
                             position_embedding_type="none", rotary_base=10000)
    torch.manual_seed(0)
    model = GPTModelBuilder(wrapped).build_model(ProcessGroupCollection.use_mpu_process_groups())
    layer = model.decoder.layers[0]
    assert isinstance(layer.mlp.linear_fc1, plugin.ColumnParallelLinear)
    assert isinstance(layer.self_attention.core_attention, plugin.CoreAttention)
    assert layer.self_attention.core_attention.options.rope == plugin.RopeOptions(theta=10000.0)
    assert isinstance(model.decoder.final_layernorm, plugin.RMSNorm)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=7, max_seqlen_kv=7)
    tokens = torch.arange(12)[None]
    loss = model(tokens, tokens, None, labels=tokens, packed_seq_params=packed).mean()
    loss.backward()
    assert torch.isfinite(loss) and loss.item() == pytest.approx(torch.log(torch.tensor(128.0)).item(), rel=0.05)
    weight = layer.mlp.linear_fc1.weight
    assert weight.std().item() == pytest.approx(config.init_method_std, rel=0.1) and weight.grad.abs().sum() > 0


def documented_command() -> list[str]:
    """The words of the pretrain_gpt.py command in docs/adapters.md."""
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    return page.split("pretrain_gpt.py", 1)[1].split("```", 1)[0].replace("\\\n", " ").split()


def test_the_documented_megatron_lm_command_builds_an_fp8_model(monkeypatch, tmp_path):
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.models.gpt import GPTModelBuilder

    plugin.initialize(small_config())
    recipe = tmp_path / "fp8.yaml"
    recipe.write_text("configs: {fp8: {te_plugin: {precision: fp8_current}}}\n"
                      "matchers: {rest: {type: glob, enabled: true, pattern: '*', config: fp8}}\n")
    words = [str(recipe) if word == "fp8.yaml" else word for word in documented_command()]
    model = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
             "--ffn-hidden-size 128 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 1 "
             "--position-embedding-type rope --train-iters 2 --lr 1e-3 --use-cpu-initialization --tokenizer-type NullTokenizer "
             "--vocab-size 128 --untie-embeddings-and-output-weights --bf16").split()
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words, *model])
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    args = parse_args()
    validate_args(args)
    args.padded_vocab_size = 128
    built = GPTModelBuilder(gpt_config_from_args(args)).build_model(ProcessGroupCollection.use_mpu_process_groups())
    report = plugin.precision_report(built)
    assert len(report) == 8 and set(report.values()) == {"fp8_current"}


def test_rotation_inside_attention_refuses_a_model_that_also_rotates_outside():
    config = transformer()
    for kind in ("rope", "learned_absolute", None):
        config.position_embedding_type = kind
        with pytest.raises(ConfigError, match="set it to 'none'"):
            plugin.rope_layer_spec(config)
        options = plugin.AttentionOptions(rope=plugin.RopeOptions(theta=1e4))
        with pytest.raises(ConfigError, match="set it to 'none'"):
            plugin.layer_spec(config, attention=options)
    config.position_embedding_type = "none"
    with pytest.raises(ConfigError, match="rotary_base"):
        plugin.rope_layer_spec(config)


@pytest.mark.report("NVIDIA/Megatron-LM#2902")
@pytest.mark.parametrize(("field", "value"), [("rotary_percent", 0.5), ("seq_len_interpolation_factor", 2.0)])
def test_rotation_inside_attention_refuses_partial_and_interpolated_rotation(field, value):
    """Megatron-LM's --rotary-percent and --rotary-seq-len-interpolation-factor."""
    from megatron.training.models.gpt import GPTModelConfig

    config = GPTModelConfig(transformer=transformer(), vocab_size=128, position_embedding_type="none", **{field: value})
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        plugin.rope_layer_spec(config)


def test_rope_scaling_of_the_model_config_reaches_attention():
    config = transformer()
    config.position_embedding_type, config.rotary_base = "none", 500000
    config.use_rope_scaling, config.rope_scaling_factor = True, 8.0
    made = plugin.rope_layer_spec(config)
    options = made.layer_specs[0].submodules.self_attention.submodules.core_attention.params["options"]
    assert options.rope == plugin.RopeOptions(theta=500000.0, factor=8.0)


@pytest.mark.report("NVIDIA/Megatron-LM#6059")
@pytest.mark.parametrize(("freq", "expected"), [
    (1, [True] * 4), (2, [True, False, True, False]), ([0, 1, 1, 0], [False, True, True, False])])
def test_moe_layer_freq_says_which_layers_are_mixtures(freq, expected):
    config = transformer(**{"moe": "tiny", "moe.ffn_hidden_size": "96", "model.num_layers": "4"})
    config.moe_layer_freq = freq
    made = [getattr(spec.submodules.mlp.func, "__name__", "") == "MoELayer" for spec in plugin.layer_spec(config).layer_specs]
    assert made == expected


def test_qk_norm_is_built_when_asked_for():
    config = transformer()
    config.qk_layernorm = True
    attention = plugin.layer_spec(config).layer_specs[0].submodules.self_attention.submodules
    assert attention.q_layernorm.func is plugin.RMSNorm and attention.k_layernorm.func is plugin.RMSNorm


def test_a_window_is_taken_from_either_place_and_a_contradiction_refused():
    model = build("layout=thd", "attention.window_left=3")
    batch = packed_batch([20])
    losses = plugin.gpt_token_losses(model, to_device(batch, "cpu"))
    # With two layers of three keys back, token 0 reaches no further than row 6.
    tokens = batch.tokens.copy()
    tokens[0] = (tokens[0] + 1) % 256
    changed = plugin.gpt_token_losses(model, to_device(dataclasses.replace(batch, tokens=tokens), "cpu"))
    assert torch.equal(changed[7:], losses[7:]) and not torch.equal(changed[:7], losses[:7])

    from megatron.core.transformer.enums import AttnMaskType

    config = transformer()
    config.window_size = (8, 0)
    with pytest.raises(ConfigError, match="window_left=3 differ"):
        plugin.CoreAttention(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal,
                             options=plugin.AttentionOptions(window_left=3))


@pytest.mark.parametrize(("change", "says"), [
    ({"sequence_parallel": True, "tensor_parallel": 2}, "sequence_parallel"), ({"context_parallel": 2}, "context_parallel"),
    ({"tensor_parallel": 4}, "num_kv_heads")])
def test_what_the_cpu_cannot_run_is_refused_by_name(change, says):
    cfg = small_config()
    for name, value in change.items():
        setattr(cfg.parallel, name, value)
    with pytest.raises(ConfigError, match=f"parallel.{says}|model.{says}"):
        plugin.transformer_config(cfg)


def test_options_that_would_mean_nothing_are_refused_where_they_are_written():
    """A layout of another name let both layouts through; text is true whatever it says."""
    for options in (dict(layout="TDH"), dict(deterministic="false")):
        with pytest.raises(ConfigError, match=next(iter(options))):
            plugin.AttentionOptions(**options)
    with pytest.raises(ConfigError, match="fuse='false' must be True or False"):
        plugin.layer_spec(transformer(), fuse="false")


def test_building_before_the_process_groups_exist_says_what_to_call():
    code = ("from te_plugin.config import compose; from te_plugin.megatron import build_gpt\n"
            "try: build_gpt(compose(['recipe=llama_tiny'], for_run=False))\n"
            "except ValueError as e: print(e)\n"
            "from te_plugin.megatron import initialize; import torch.distributed as d\n"
            "cfg = compose(['recipe=llama_tiny'], for_run=False); initialize(cfg); initialize(cfg); print(d.get_world_size())\n"
            "print(sum(p.numel() for p in build_gpt(cfg).parameters()))")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200,
                          env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 0, done.stderr
    said, world, parameters = done.stdout.splitlines()
    assert "initialize(cfg, device) first" in said and world == "1" and int(parameters) == 3344640


def test_the_loss_of_labels_that_predict_nothing_is_zero_and_moves_no_weight():
    model = build("layout=thd")
    batch = packed_batch([8, 8])
    nothing = dataclasses.replace(batch, labels=batch.labels * 0 - 100)
    losses = plugin.gpt_token_losses(model, to_device(nothing, "cpu"))
    losses.sum().backward()
    assert losses.dtype == torch.float32 and torch.count_nonzero(losses) == 0
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())
