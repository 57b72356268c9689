"""Packed rows compute what their documents compute alone, through the whole model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_models import build, mean_loss, packed_batch, padded_batch, small_config

from te_plugin import megatron as plugin
from te_plugin.torch.batch import to_device

LENGTHS = [7, 13, 32, 1, 11]


def per_document(model, batch) -> list[float]:
    """Summed loss of each document of a packed batch."""
    losses = plugin.gpt_token_losses(model, to_device(batch, "cpu"))
    count = batch.segments
    lengths = np.diff(batch.cu_seqlens)[:count]
    return [losses[s:s + n].sum().item() for s, n in zip(batch.cu_seqlens_padded[:count], lengths, strict=True)]


def per_row(model, padded) -> list[float]:
    losses = plugin.gpt_token_losses(model, to_device(padded, "cpu"))
    return losses.view(padded.tokens.shape).sum(1).tolist()


def test_per_document_losses_of_packed_rows_equal_one_document_a_row():
    packed = packed_batch(LENGTHS)
    thd = per_document(build("layout=thd"), packed)
    bshd = per_row(build("layout=bshd"), padded_batch(packed, 40))
    assert thd == pytest.approx(bshd, abs=1e-5)


def test_five_optimizer_steps_give_the_same_parameters_packed_and_one_document_a_row():
    models = {layout: build(f"layout={layout}") for layout in ("thd", "bshd")}
    losses = {layout: [] for layout in models}
    for layout, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        for step in range(5):
            batch = packed_batch(LENGTHS, seed=step)
            loss = mean_loss(model, batch if layout == "thd" else padded_batch(batch, 32))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[layout].append(loss.item())
    assert losses["thd"] == pytest.approx(losses["bshd"], abs=1e-5)
    assert losses["thd"][-1] < losses["thd"][0]
    for (name, a), (_, b) in zip(models["thd"].named_parameters(), models["bshd"].named_parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-4, name


def test_gaps_and_unused_segment_entries_change_nothing():
    model = build("layout=thd")
    plain = packed_batch(LENGTHS)
    gapped = packed_batch(LENGTHS, gaps=[1, 3, 0, 7, 5], capacity=9)
    assert per_document(model, gapped) == pytest.approx(per_document(model, plain), abs=1e-5)


@pytest.mark.report("NVIDIA-NeMo/Megatron-Bridge#4400")
def test_repeated_last_entries_of_cu_seqlens_are_empty_segments():
    model = build("layout=thd")
    plain, spare = packed_batch([16, 24]), packed_batch([16, 24], capacity=4)
    assert spare.cu_seqlens.tolist() == [0, 16, 40, 40, 40]
    a, b = (plugin.gpt_token_losses(model, to_device(x, "cpu")) for x in (plain, spare))
    assert torch.equal(a, b)


@pytest.mark.report("NVIDIA-NeMo/Megatron-Bridge#4400")
def test_decreasing_cu_seqlens_are_refused():
    bad = dataclasses.replace(packed_batch([5, 4]), cu_seqlens=np.asarray([0, 9, 5], np.int32))
    with pytest.raises(ValueError, match="must not decrease"):
        to_device(bad, "cpu")


@pytest.mark.report("huggingface/nanoVLM#204")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_token_of_document_one_reaches_document_two(precision):
    model = build("layout=thd", f"precision={precision}")
    batch = packed_batch([5, 7, 20])
    before = plugin.gpt_token_losses(model, to_device(batch, "cpu"))
    for changed in range(5):
        tokens = batch.tokens.copy()
        tokens[changed] = (tokens[changed] + 1) % 256
        after = plugin.gpt_token_losses(model, to_device(dataclasses.replace(batch, tokens=tokens), "cpu"))
        assert torch.equal(after[5:], before[5:])
        assert changed == 4 or not torch.equal(after[:5], before[:5])  # the last token predicts nothing


def test_gradients_of_document_two_ignore_document_one():
    model = build("layout=thd")
    batch = to_device(packed_batch([5, 7]), "cpu")
    grads = []
    embedding = model.embedding.word_embeddings.weight
    plugin.gpt_token_losses(model, batch)[5:].sum().backward()
    only_first = set(batch.tokens[:5].tolist()) - set(batch.tokens[5:].tolist())
    grads = embedding.grad[sorted(only_first)]
    assert only_first and torch.count_nonzero(grads) == 0


@pytest.mark.report("NVIDIA-NeMo/Megatron-Bridge#2952")
def test_a_layer_without_packed_parameters_is_an_error_under_thd():
    model = build("layout=thd")
    inputs = plugin.model_inputs(to_device(packed_batch([8, 8]), "cpu"))
    with pytest.raises(ValueError, match="layer 1 got no packed_seq_params and layout=thd"):
        model(**{**inputs, "packed_seq_params": None})


def test_packed_parameters_are_an_error_under_bshd():
    model = build("layout=bshd")
    with pytest.raises(ValueError, match="layout=bshd"):
        model(**plugin.model_inputs(to_device(packed_batch([8, 8]), "cpu")))


def test_a_dense_attention_mask_is_refused_not_ignored():
    model = build("layout=bshd")
    inputs = plugin.model_inputs(to_device(padded_batch(packed_batch([8, 8]), 8), "cpu"))
    dense = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    with pytest.raises(ValueError, match="--no-create-attention-mask-in-dataloader"):
        model(**{**inputs, "attention_mask": dense})


def test_megatrons_own_packed_parameters_work_without_positions():
    """A Megatron-LM loop passes PackedSeqParams, not PackedRows: positions then come from cu_seqlens."""
    model = build("layout=thd")
    batch = to_device(packed_batch(LENGTHS, gaps=[1, 0, 2, 0, 0]), "cpu")
    inputs = plugin.model_inputs(batch)
    fields = {f.name: getattr(inputs["packed_seq_params"], f.name) for f in dataclasses.fields(PackedSeqParams) if f.init}
    a = model(**inputs)
    b = model(**{**inputs, "packed_seq_params": PackedSeqParams(**fields)})
    real = batch.labels >= 0
    assert torch.equal(a.view(-1)[real], b.view(-1)[real])


@pytest.mark.report("NVIDIA-NeMo/Megatron-Bridge#2952")
def test_a_model_cut_in_three_stages_gives_the_loss_of_one():
    cfg = small_config("layout=thd", "model.num_layers=4")
    plugin.initialize(cfg)
    whole = plugin.build_gpt(cfg)
    batch = to_device(packed_batch([9, 20, 3]), "cpu")
    expected = plugin.gpt_token_losses(whole, batch)
    weights = {name: value.detach().numpy() for name, value in plugin.common_weights(whole, cfg.model)}

    inputs = plugin.model_inputs(batch)
    hidden, first = None, 0
    for index, layers in enumerate((1, 2, 1)):
        config = plugin.transformer_config(cfg, "cpu", first_layer=first, num_layers=layers)
        stage = plugin.build_stage(cfg, config, "cpu", pre_process=index == 0, post_process=index == 2)
        plugin.fill(stage, cfg.model, lambda name, first=first: weights[_shifted(name, first)])
        if hidden is not None:
            stage.set_input_tensor(hidden)
        hidden = stage(**{**inputs, "labels": inputs["labels"] if index == 2 else None},
                       **({"output_processor": plugin.loss.token_losses} if index == 2 else {}))
        first += layers
    assert torch.equal(hidden.view(-1), expected)


def _shifted(name: str, by: int) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        parts[2] = str(int(parts[2]) + by)
    return ".".join(parts)


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
@pytest.mark.report("NVIDIA/TransformerEngine#2911")
def test_padding_rows_reach_no_scale_and_no_gradient(precision):
    """A padding token with one huge channel, which the norm turns into the batch's amax, must not move a loss or a gradient."""
    model = build("layout=thd", f"precision={precision}")
    batch = packed_batch([30, 21], gaps=[8, 5])
    outside = to_device(batch, "cpu").padding.numpy()
    results = []
    for pad_token, size in ((300, 0.0), (301, 1e4)):
        with torch.no_grad():
            model.embedding.word_embeddings.weight[pad_token] = 0.0
            model.embedding.word_embeddings.weight[pad_token, 3] = size
        model.zero_grad()
        loss = mean_loss(model, dataclasses.replace(batch, tokens=np.where(outside, pad_token, batch.tokens).astype(np.int32)))
        loss.backward()
        results.append([loss.detach(), *[p.grad.clone() for n, p in model.named_parameters() if "output_layer" not in n]])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def _forward(packed: PackedSeqParams, rows: int = 1):
    tokens = torch.arange(64).repeat(rows, 1)
    return build()(input_ids=tokens, position_ids=tokens, attention_mask=None, packed_seq_params=packed)


def _of(*cu: int):
    return torch.tensor(cu, dtype=torch.int32)


def test_segments_of_the_keys_are_read_and_not_assumed_to_be_those_of_the_queries():
    """Equal values in other tensors change nothing; other segments are refused: NVIDIA/Megatron-LM#4103's kind, fields of
    packed_seq_params that reach no kernel. https://github.com/NVIDIA/Megatron-LM/pull/4103"""
    cu = _of(0, 20, 32, 64)
    one = _forward(PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu))
    assert torch.equal(one, _forward(PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu.clone())))
    with pytest.raises(ValueError, match="20 and 32"):
        _forward(PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=_of(0, 32, 40, 64)))
    with pytest.raises(ValueError, match="cu_seqlens_kv_padded"):
        _forward(PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_kv_padded=_of(0, 24, 40, 64)))
    with pytest.raises(ValueError, match="cu_seqlens_q is None"):
        _forward(PackedSeqParams(qkv_format="thd"))


def test_several_packed_rows_of_a_microbatch_are_refused_with_what_to_do():
    """Elsewhere only the first row's boundaries were used: https://github.com/NVIDIA/Megatron-LM/pull/5454"""
    cu = _of(0, 20, 32, 64)
    with pytest.raises(ValueError, match="join its rows"):
        _forward(PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu), rows=2)


@pytest.mark.parametrize("padding", [[True] * 2 + [False] * 6, [True] * 6 + [False] * 2], ids=["left padding", "inverted"])
def test_a_padding_mask_with_tokens_after_padding_is_refused(padding):
    """Only its count was read, so padding took the place of tokens: https://github.com/Dao-AILab/flash-attention/issues/649"""
    model = build("layout=bshd")
    tokens = torch.arange(8)[None]
    with pytest.raises(ValueError, match="token after padding"):
        model(input_ids=tokens, position_ids=tokens, attention_mask=torch.tensor(padding)[None, None, None])


def test_keys_from_a_cache_are_refused_by_name():
    """Decoding gives one query and many keys: https://github.com/NVIDIA/TransformerEngine/pull/400"""
    attention = build("layout=bshd").decoder.layers[0].self_attention.core_attention
    with pytest.raises(ValueError, match="KV cache"):
        attention(torch.zeros(1, 1, 4, 16), torch.zeros(9, 1, 2, 16), torch.zeros(9, 1, 2, 16))
