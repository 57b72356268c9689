"""TePluginConfig: what te_plugin adds to MaxText's configuration, and what it refuses by name."""

import pytest
from maxtext.configs import pyconfig

from te_plugin.maxtext import TePluginConfig
from te_plugin.maxtext.settings import base_config

TINY = dict(
    model_name="default", override_model_config=True, run_name="tiny", base_output_directory=".", base_emb_dim=64,
    base_num_query_heads=4, base_num_kv_heads=2, head_dim=16, base_mlp_dim=128, base_num_decoder_layers=2, decoder_block="llama2",
    vocab_size=256, max_target_length=64, per_device_batch_size=2, steps=3, dataset_type="synthetic", enable_checkpointing=False,
    hardware="cpu", skip_jax_distributed_system=True, enable_goodput_recording=False, monitor_goodput=False, log_config=False,
    enable_tensorboard=False, gcs_metrics=False, dtype="float32", weight_dtype="float32", jax_cache_dir="",
)  # fmt: skip


def config(**overrides):
    return pyconfig.initialize(["test", base_config()], config_class=TePluginConfig, **TINY, **overrides)


def test_te_plugin_is_chosen_by_name_and_capacity_comes_from_packing():
    made = config(attention="te_plugin", quantization="te_plugin_fp8_current", max_segments_per_seq=7)
    assert made.attention == "te_plugin" and made.quantization == "te_plugin_fp8_current"
    assert made.te_plugin_segment_capacity == 7
    assert config(attention="te_plugin", packing=False, max_segments_per_seq=7).te_plugin_segment_capacity == 1


def test_maxtexts_own_names_still_pass():
    assert config(attention="dot_product", quantization="fp8").quantization == "fp8"


@pytest.mark.parametrize("overrides,words", [
    (dict(attention="te_plugin", ici_context_parallelism=2), ["ici_context_parallelism=2", "one device"]),
    (dict(attention="te_plugin", attention_sink=True), ["attention_sink", "sinks"]),
    (dict(attention="te_plugin", attn_logits_soft_cap=30.0), ["attn_logits_soft_cap=30", "soft cap"]),
    (dict(attention="te_plugin", attention_type="local_sliding", sliding_window_size=8), ["local_sliding", "global"]),
    (dict(attention="dot_product", te_plugin_softmax_scale=0.1), ["te_plugin_softmax_scale", "attention=te_plugin"]),
    (dict(te_plugin_segment_capacity=3), ["te_plugin_segment_capacity=3", "max_segments_per_seq"]),
    (dict(quantization="te_plugin_fp8_current", te_plugin_amax_history_len=4), ["te_plugin_amax_history_len", "fp8_delayed"]),
    (dict(quantization="te_plugin_fp8_delayed", gradient_accumulation_steps=2), ["gradient_accumulation_steps=2", "fp8_delayed"]),
    (dict(quantization="te_plugin_fp8_current", use_qwix_quantization=True), ["use_qwix_quantization"]),
    (dict(quantization="te_plugin_fp8_nothing"), ["quantization"]),
    (dict(quantization="te_plugin_fp8_current", weight_sparsity_n=2, weight_sparsity_m=4), ["weight_sparsity_n=2", "ignored"]),
    (dict(quantization="te_plugin_fp8_current", bwd_quantization_calibration_method="fixed,1"), ["bwd_quantization", "ignored"]),
    (dict(quantization="te_plugin_no_quant", te_gmm_quantization="te_no_quant"), ["te_gmm_quantization=te_no_quant", "ignored"]),
    (dict(quantization="te_plugin_fp8_current", shard_mode="explicit"), ["shard_mode=explicit", "shard_mode=auto"]),
    (dict(te_plugin_fallback="warn"), ["te_plugin_fallback=warn", "attention=te_plugin and quantization=te_plugin_*"]),
])  # fmt: skip
def test_what_would_be_ignored_or_wrong_is_refused_by_name(overrides, words):
    with pytest.raises(Exception) as refused:
        config(**overrides)
    for word in words:
        assert word in str(refused.value)


def test_packed_rows_need_to_say_how_many_segments_they_hold():
    keys = {**TINY, "dataset_type": "grain", "grain_train_files": "x.parquet", "grain_file_type": "parquet"}
    with pytest.raises(Exception, match="max_segments_per_seq"):
        pyconfig.initialize(["test", base_config()], config_class=TePluginConfig, attention="te_plugin", **keys)
