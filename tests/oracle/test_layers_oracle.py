"""RMSNorm, SwiGLU, RoPE and cross-entropy references against torch autograd in float64."""

import numpy as np
import pytest
import torch

from te_plugin import oracle


def leaf(x):
    return torch.tensor(x, requires_grad=True)


def test_rms_norm(rng):
    x, w, dy = rng.standard_normal((7, 12)), rng.standard_normal(12), rng.standard_normal((7, 12))
    tx, tw = leaf(x), leaf(w)
    y = torch.nn.functional.rms_norm(tx, (12,), tw, eps=1e-5)
    y.backward(torch.tensor(dy))
    np.testing.assert_allclose(oracle.rms_norm_forward(x, w)[0], y.detach().numpy(), rtol=1e-12)
    dx, dw = oracle.rms_norm_backward(dy, x, w)
    np.testing.assert_allclose(dx, tx.grad.numpy(), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(dw, tw.grad.numpy(), rtol=1e-10)


def test_swiglu_also_for_large_gates(rng):
    x = rng.standard_normal((5, 16)) * 4
    x[0, 0], x[1, 0] = -800, 800
    dy = rng.standard_normal((5, 8))
    tx = leaf(x)
    gate, up = tx.chunk(2, dim=1)
    y = torch.nn.functional.silu(gate) * up
    y.backward(torch.tensor(dy))
    np.testing.assert_allclose(oracle.swiglu_forward(x), y.detach().numpy(), rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(oracle.swiglu_backward(dy, x), tx.grad.numpy(), rtol=1e-12, atol=1e-300)


def test_cross_entropy_ignores_masked_tokens(rng):
    logits, labels = rng.standard_normal((6, 11)) * 30, np.array([3, -100, 0, 10, -100, 5])
    dloss = rng.standard_normal(6)
    tl = leaf(logits)
    loss = torch.nn.functional.cross_entropy(tl, torch.tensor(labels), ignore_index=-100, reduction="none")
    loss.backward(torch.tensor(dloss))
    np.testing.assert_allclose(oracle.cross_entropy_forward(logits, labels)[0], loss.detach().numpy(), rtol=1e-12)
    got = oracle.cross_entropy_backward(dloss, logits, labels)
    np.testing.assert_allclose(got, tl.grad.numpy(), atol=1e-14)
    assert not got[[1, 4]].any()


def test_rope_rotates_half_split_pairs_and_inverts(rng):
    x, inv_freq = rng.standard_normal((5, 2, 8)), oracle.rope_inv_freq(8, 10000.0)
    positions = np.array([0, 1, 2, 0, 100000])
    y = oracle.rope(x, positions, inv_freq)
    np.testing.assert_allclose(oracle.rope(y, positions, inv_freq, inverse=True), x, atol=1e-13)
    assert np.array_equal(y[0], x[0]) and np.array_equal(y[3:4], oracle.rope(x[3:4], [0], inv_freq))
    turned = (x[1, 0, :4] + 1j * x[1, 0, 4:]) * np.exp(1j * inv_freq.astype(np.float64))
    np.testing.assert_allclose(y[1, 0], np.concatenate([turned.real, turned.imag]), atol=1e-13)


def test_rope_scores_depend_on_distance_only(rng):
    inv_freq = oracle.rope_inv_freq(64)
    q, k = rng.standard_normal((1, 1, 64)), rng.standard_normal((1, 1, 64))
    score = [float((oracle.rope(q, [a], inv_freq) * oracle.rope(k, [b], inv_freq)).sum()) for a, b in ((9, 4), (105, 100))]
    np.testing.assert_allclose(score[0], score[1], rtol=1e-5)


def test_qkv_layouts_and_gradient(rng):
    assert oracle.qkv_heads(4, 2, "split") == ([0, 1, 2, 3], [4, 5], [6, 7])
    assert oracle.qkv_heads(4, 2, "grouped") == ([0, 1, 4, 5], [2, 6], [3, 7])
    with pytest.raises(ValueError, match="not one of split, grouped"):
        oracle.qkv_heads(4, 2, "mixed")
    positions, inv_freq = np.array([3, 0, 7]), oracle.rope_inv_freq(8)
    for layout in ("split", "grouped"):
        x, dy = rng.standard_normal((3, 64)), [rng.standard_normal((3, h, 8)) for h in (4, 2, 2)]
        y = oracle.qkv_rope(x, positions, inv_freq, 4, 2, layout)
        # The map is linear, so its gradient is its transpose: <dy, f(x)> = <f'(dy), x>.
        gradient = oracle.qkv_rope_backward(*dy, positions, inv_freq, layout)
        np.testing.assert_allclose(sum((a * b).sum() for a, b in zip(dy, y, strict=True)), (gradient * x).sum(), rtol=1e-12)


def test_llama31_frequencies_equal_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        rope_theta=500000.0,
        rope_scaling=dict(scaling),
        max_position_embeddings=131072,
    )
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    got = oracle.rope_inv_freq(128, 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)
    assert not np.allclose(got, oracle.rope_inv_freq(128, 500000.0))
