"""Imported llamas give the logits of transformers, and bad sources are refused before anything is written."""

import json

import numpy as np
import pytest
import torch

from te_plugin.config import ConfigError, compose
from te_plugin.importing import ImportedWeights, import_weights
from te_plugin.importing.gguf import pairs_to_halves

transformers = pytest.importorskip("transformers")


def small_llama(**changes):
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        vocab_size=384, rms_norm_eps=1e-5, tie_word_embeddings=False, **changes)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).float().eval()


def megatron_logits(folder, tokens: torch.Tensor) -> torch.Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams

    import te_plugin.megatron as megatron
    from te_plugin.megatron.weights import fill

    weights = ImportedWeights(folder)
    cfg = compose(["recipe=llama_tiny", "precision=fp32"])
    cfg.model = weights.model
    megatron.initialize(cfg)
    model = megatron.build_gpt(cfg, torch.device("cpu"))
    fill(model, cfg.model, weights.torch_source())
    cu = torch.tensor([0, len(tokens)], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=len(tokens),
                             max_seqlen_kv=len(tokens))
    with torch.no_grad():
        logits = model(tokens[None], torch.arange(len(tokens))[None], None, packed_seq_params=packed)
    return logits.reshape(len(tokens), -1)


@pytest.mark.parametrize("rope", ["plain", "llama3"])
def test_hugging_face_folder_gives_the_logits_of_transformers(tmp_path, rope):
    changes = {}
    if rope == "llama3":
        changes = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}
    model = small_llama(**changes)
    model.save_pretrained(tmp_path / "hf")
    sizes = import_weights(tmp_path / "hf", tmp_path / "out", dtype="fp32")
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (2, 1, 64)
    tokens = torch.randint(0, 384, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    got = megatron_logits(tmp_path / "out", tokens)
    assert (got - expected).norm() / expected.norm() < 1e-5


def test_rotary_rows_are_put_back_in_halves():
    rows = np.arange(8, dtype=np.float32)[:, None]  # one head of 8: pairs are (0,1), (2,3), ...
    assert pairs_to_halves(rows, 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("change, message", [
    ({"model_type": "gpt2"}, "gpt2"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ({"num_hidden_layers": 3}, "model.layers.2"),
    ({"intermediate_size": 512}, "gate_proj"),
])
def test_what_is_not_this_llama_is_refused_and_nothing_is_left(tmp_path, change, message):
    small_llama().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        import_weights(tmp_path / "hf", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_missing_and_occupied_places_are_named(tmp_path):
    with pytest.raises(ConfigError, match="neither a folder"):
        import_weights(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="config.json"):
        import_weights(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(ConfigError, match="exists already"):
        import_weights(tmp_path / "empty", tmp_path / "empty")


def test_sizes_that_differ_from_the_run_are_all_named(tmp_path):
    small_llama().save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "out")
    weights = ImportedWeights(tmp_path / "out")
    model = compose(["recipe=llama_tiny"]).model
    with pytest.raises(ConfigError, match="num_layers: 4 in the run, 2 in the weights.*head_dim: 128"):
        weights.check(model)


def test_a_run_starts_from_imported_weights(tmp_path):
    """The held-out loss of step 1 is that of the imported model, and a model of other sizes is refused by name."""
    import te_plugin.megatron as megatron

    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=128,
        vocab_size=384, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    torch.manual_seed(1)
    source = transformers.LlamaForCausalLM(config).float()
    source.save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "out", dtype="fp32")
    cfg = compose(["recipe=llama_tiny", "precision=fp32", f"run.init_from={tmp_path / 'out'}"])
    megatron.initialize(cfg)
    model = megatron.build_gpt(cfg, torch.device("cpu"))
    found = dict(megatron.common_weights(model, cfg.model))
    expected = source.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    cfg.model.norm_eps = 1e-6
    with pytest.raises(ConfigError, match="norm_eps: 1e-06 in the run, 1e-05 in the weights"):
        megatron.build_gpt(cfg, torch.device("cpu"))
