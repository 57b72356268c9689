"""Imported llamas give the logits of transformers, and bad sources are refused before anything is written."""

import json

import ml_dtypes
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


@pytest.mark.report("NVIDIA/Megatron-LM#6305")
@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
def test_hugging_face_folder_gives_the_logits_of_transformers(tmp_path, factor):
    changes = {}
    if factor is not None:
        changes = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
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


@pytest.mark.report("deepspeedai/DeepSpeed#8341")
@pytest.mark.parametrize("change, message", [
    ({"model_type": "gpt2"}, "gpt2"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "rope_parameters has factor and no rope_type"),
    ({"rope_parameters": {"full_attention": {"rope_type": "llama3", "factor": 8.0}}}, "has full_attention and no rope_type"),
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
    small_llama().save_pretrained(tmp_path / "hf")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/out cannot be written: Not a directory"):
        import_weights(tmp_path / "hf", tmp_path / "file" / "out")


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


def stored(tmp_path, change=None, header=None, **changes):
    """A folder whose weights `change` has edited (name -> array, in place) and whose header got `header`."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "hf"
    small_llama(**changes).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if change is not None:
        change(weights)
    save_file(weights, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(header or {})}))
    return folder


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.report("paiml/entrenar#258", "NVIDIA-NeMo/Automodel#2511", "NVIDIA-NeMo/Megatron-Bridge#1746")
@pytest.mark.parametrize("change, header, message", [
    (lambda w: w.update({Q + ".bias": np.ones(128, np.float32)}), {}, "q_proj.bias: without them it would be another model"),
    (lambda w: w.update({"model.layers.2.input_layernorm.weight": np.ones(128, np.float32)}), {}, "model.layers.2"),
    (None, {"tie_word_embeddings": True}, "lm_head.weight"),
    (lambda w: w.update({Q + ".weight": w[Q + ".weight"].astype(np.int8)}), {}, "stored as I8; quantised weights"),
    (lambda w: w.update({Q + ".weight": w[Q + ".weight"].astype(ml_dtypes.float8_e4m3fn)}), {}, "stored as F8_E4M3"),
    (None, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    (None, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (lambda w: w["model.norm.weight"].fill(np.nan), {}, "model.norm.weight holds values that are not finite"),
], ids=["bias", "more layers", "untied head", "int8", "fp8", "quantised header", "partial rotary", "nan"])
def test_what_would_be_dropped_or_misread_is_refused(tmp_path, change, header, message):
    folder = stored(tmp_path, change, header)
    with pytest.raises(ConfigError, match=message):
        import_weights(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_follows_from_the_rest_may_be_stored(tmp_path):
    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(32, np.float32)

    folder = stored(tmp_path, change, {"tie_word_embeddings": True})
    assert import_weights(folder, tmp_path / "out").tie_embeddings


def test_a_file_that_lies_beside_the_model_is_not_part_of_it(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = stored(tmp_path)
    names = list(load_file(folder / "model.safetensors"))
    save_file({"model.norm.weight": np.zeros(128, np.float32)}, folder / "older.safetensors")
    with pytest.raises(ConfigError, match="model.norm.weight is in model.safetensors and in older.safetensors"):
        import_weights(folder, tmp_path / "out")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    import_weights(folder, tmp_path / "out")
    assert ImportedWeights(tmp_path / "out").numpy_source()("model.norm.weight").all()


@pytest.mark.parametrize("name, damage, message", [
    ("config.json", lambda raw: b"{", "config.json cannot be read as JSON"),
    ("config.json", lambda raw: b"[]", "config.json is \\[\\] where keys are expected"),
    ("config.json", lambda raw: raw.replace(b"rms_norm_eps", b"rms_eps"), "does not say rms_norm_eps"),
    ("config.json", lambda raw: raw.replace(b'hidden_layers": 2', b'hidden_layers": "2"'), "num_hidden_layers is '2'"),
    ("config.json", lambda raw: raw.replace(b'attention_heads": 2', b'attention_heads": 0'), "num_attention_heads is 0"),
    ("model.safetensors.index.json", lambda raw: b"{}", "weight_map is None where keys are expected"),
    ("model.safetensors.index.json", lambda raw: b'{"weight_map": {"model.norm.weight": "../a"}}', "names '../a', which is no"),
    ("model.safetensors.index.json", lambda raw: b'{"weight_map": {"model.norm.weight": 5}}', "names 5, which is no file of"),
    ("model.safetensors", lambda raw: raw[:-100], "model.safetensors cannot be read"),
])
def test_a_damaged_folder_is_one_clear_error(tmp_path, name, damage, message):
    path = stored(tmp_path) / name
    path.write_bytes(damage(path.read_bytes() if path.exists() else b""))
    with pytest.raises(ConfigError, match=message):
        import_weights(tmp_path / "hf", tmp_path / "out")


def test_a_file_that_is_no_gguf_is_one_clear_error(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"x")
    with pytest.raises(ConfigError, match="model.gguf cannot be read"):
        import_weights(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", ": :", "name: x\n", "rope_scaling: 5\n", "rope_scaling: {}\nunknown: 1\n"])
def test_a_damaged_folder_of_imported_weights_is_one_clear_error(tmp_path, text):
    import_weights(stored(tmp_path), tmp_path / "out")
    (tmp_path / "out" / "model.yaml").write_text(text)
    with pytest.raises(ConfigError, match="out/model.yaml is not what te-plugin import-hf wrote"):
        ImportedWeights(tmp_path / "out")


@pytest.mark.parametrize("source", ["torch_source", "numpy_source"])
def test_imported_weights_that_were_cut_are_one_clear_error(tmp_path, source):
    import_weights(stored(tmp_path), tmp_path / "out")
    path = tmp_path / "out" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="weights.safetensors cannot be read: .*import the weights again"):
        getattr(ImportedWeights(tmp_path / "out"), source)()("model.norm.weight")


def test_a_folder_named_like_the_unfinished_one_is_not_removed(tmp_path):
    folder = stored(tmp_path)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("of the user")
    with pytest.raises(ConfigError, match="out.partial exists: an import was killed there"):
        import_weights(folder, tmp_path / "out")
    assert (tmp_path / "out.partial" / "mine").read_text() == "of the user"


def test_weights_beyond_bf16_are_refused(tmp_path):
    folder = stored(tmp_path, lambda weights: weights["model.norm.weight"].fill(3.4e38))
    with pytest.raises(ConfigError, match="model.norm.weight holds values that are not finite in bf16"):
        import_weights(folder, tmp_path / "out")
    import_weights(folder, tmp_path / "out", dtype="fp32")


def gguf_file(path, drop=(), **changes):
    """A one-layer llama of zeros as GGUF; changes: header values by their key after `llama.`."""
    gguf = pytest.importorskip("gguf")
    header = {"block_count": 1, "embedding_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1,
              "feed_forward_length": 128, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 32} | changes
    sizes = {"attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
             "ffn_norm": (64,), "ffn_gate": (128, 64), "ffn_up": (128, 64), "ffn_down": (64, 128)}
    tensors = {"token_embd": (384, 64), "output_norm": (64,), **{f"blk.0.{name}": size for name, size in sizes.items()}}
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in header.items():
        add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        if key not in drop:
            add(f"llama.{key}", value)
    for name, size in tensors.items():
        if name not in drop:
            writer.add_tensor(f"{name}.weight", np.zeros(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_of_a_plain_llama_is_read(tmp_path):
    model = import_weights(gguf_file(tmp_path / "a.gguf"), tmp_path / "out")
    assert (model.num_layers, model.head_dim, model.num_kv_heads, model.tie_embeddings, model.norm_eps) == (1, 32, 1, True, 1e-5)


@pytest.mark.parametrize("drop, changes, message", [
    (["attention.head_count"], {}, "does not say attention.head_count"),
    ([], {"attention.head_count": [2, 2]}, r"attention.head_count is \[2, 2\]"),
    (["attention.layer_norm_rms_epsilon"], {}, "does not say attention.layer_norm_rms_epsilon"),
    ([], {"rope.dimension_count": 16}, "rotates 16 of 32 elements"),
    (["token_embd"], {}, "holds no matrix token_embd.weight; the first file of a split model"),
    (["blk.0.ffn_up"], {}, "lacks 1 of 11 weights, the first is model.layers.0.mlp.up_proj"),
], ids=["no heads", "heads by layer", "no eps", "partial rotary", "no embedding", "no weight"])
def test_a_gguf_that_is_no_whole_plain_llama_is_one_clear_error(tmp_path, drop, changes, message):
    with pytest.raises(ConfigError, match=message):
        import_weights(gguf_file(tmp_path / "a.gguf", drop, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()
