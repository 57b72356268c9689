"""Rotary embedding: frequencies, Llama 3.1 scaling, positions under packing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron_models import build, packed_batch

from te_plugin import megatron as plugin
from te_plugin.megatron.rope import RopeOptions, inverse_frequencies
from te_plugin.torch import functional
from te_plugin.torch.batch import to_device


def test_frequencies_are_powers_of_theta():
    made = inverse_frequencies(8, RopeOptions(theta=10000.0))
    assert made.dtype == np.float32
    assert made.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama_3_1_scaling_equals_megatrons(head_dim):
    options = RopeOptions(theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    theirs = RotaryEmbedding(head_dim, rotary_percent=1.0, rotary_base=500000, rope_scaling=True, rope_scaling_factor=8.0,
                             use_cpu_initialization=True)
    np.testing.assert_allclose(inverse_frequencies(head_dim, options), theirs.inv_freq.numpy(), rtol=2e-6)


def test_llama_3_1_scaling_keeps_fast_pairs_stretches_slow_ones_and_blends_between():
    plain = inverse_frequencies(128, RopeOptions(theta=500000.0)).astype(np.float64)
    scaled = inverse_frequencies(128, RopeOptions(theta=500000.0, factor=8.0)).astype(np.float64)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(scaled[fast], plain[fast], rtol=1e-6)
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


@pytest.mark.parametrize("options", [RopeOptions(theta=0.0), RopeOptions(theta=-1e4), RopeOptions(theta=1e4, factor=0.0)])
def test_a_base_or_factor_that_gives_no_frequencies_is_refused(options):
    with pytest.raises(ValueError, match="must be above 0"):
        inverse_frequencies(8, options)


def test_an_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="head_dim 5 is odd"):
        inverse_frequencies(5, RopeOptions(theta=10000.0))


@pytest.mark.report("NVIDIA/Megatron-LM#453")
@pytest.mark.parametrize("heads", [1, 4])
def test_rotated_rows_of_a_later_segment_equal_those_of_the_segment_alone(heads):
    x = torch.randn(5, heads, 16)
    inv_freq = torch.from_numpy(inverse_frequencies(16, RopeOptions(theta=10000.0)))
    packed = functional.rope(x, torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32), inv_freq=inv_freq)
    alone = functional.rope(x[3:5].contiguous(), torch.tensor([0, 1], dtype=torch.int32), inv_freq=inv_freq)
    assert torch.equal(packed[3:5], alone)


def test_rotation_inside_core_attention_equals_megatrons_rotary_module():
    """The same model with Megatron's rotary module on a CPU: its table moved off CUDA by a subclass, given through the model."""

    class OnCpu(RotaryEmbedding):
        def get_emb(self, max_seq_len, offset=0):
            frequencies = self.get_freqs_non_repeated(max_seq_len, offset)
            return torch.cat((frequencies, frequencies), dim=-1)[:, None, None, :]

    ours = build("layout=thd", "model.rope_theta=10000")
    theirs = build("layout=thd", "model.rope_theta=10000")
    for layer in theirs.decoder.layers:
        core = layer.self_attention.core_attention
        core.options = dataclasses.replace(core.options, rope=None)
    theirs.position_embedding_type = "rope"
    theirs.rotary_pos_emb = OnCpu(16, rotary_percent=1.0, rotary_base=10000, use_cpu_initialization=True,
                                  cp_group=theirs.pg_collection.cp)
    batch = to_device(packed_batch([9, 30, 2]), "cpu")
    inputs = plugin.model_inputs(batch)
    inputs["packed_seq_params"].max_seqlen_q = inputs["packed_seq_params"].max_seqlen_kv = 30
    expected = theirs(**inputs, output_processor=plugin.loss.token_losses).view(-1)
    torch.testing.assert_close(plugin.gpt_token_losses(ours, batch), expected, rtol=0, atol=2e-6)
    # and positions matter at all
    for layer in theirs.decoder.layers:
        assert layer.self_attention.core_attention.options.rope is None
    theirs.position_embedding_type = "none"
    without = theirs(**inputs, output_processor=plugin.loss.token_losses).view(-1)
    assert (without - expected).abs().max() > 1e-4
