"""Packed rows through MaxText's own model: te_plugin's attention equals MaxText's dot_product, and segments matter."""

import jax
import numpy as np
import pytest
from small import batches, config

from te_plugin.jax import launches
from te_plugin.maxtext.model import TrainedModel
from te_plugin.maxtext.weights import Layout
from te_plugin.training.step import without_document_mask


def plain_maxtext(cfg, **overrides):
    """A model in MaxText's own convention: softmax scale 1, and 1/sqrt(head_dim) in the query kernel."""
    model = TrainedModel(cfg, lambda done: 1e-3, jax.devices()[:1], te_plugin_softmax_scale=None, **overrides)
    model.layout = Layout(cfg.model, query_scale=cfg.model.head_dim**-0.5)
    model.initialise()
    return model


@pytest.mark.report("AI-Hypercomputer/maxtext#4476")
def test_packed_losses_and_gradients_equal_maxtexts_dot_product_and_depend_on_segments():
    cfg = config("precision=fp32")
    first, second = batches(cfg, 2, 4)
    assert first.segments > first.rows, "rows hold several documents"
    launches.reset()
    ours = plain_maxtext(cfg)
    got = [ours.step(ours.batch([batch])) for batch in (first, second)]
    assert any(row["op"] == "attention" for row in launches.snapshot())
    assert abs(float(got[0]["loss"]) - np.log(cfg.model.vocab_size)) < 0.1, "a new model guesses uniformly"

    theirs = plain_maxtext(cfg, attention="dot_product", te_plugin_attention_kernel="auto", quantization="")
    want = [theirs.step(theirs.batch([batch])) for batch in (first, second)]
    for name in ("loss", "grad_norm"):
        print(name, "te_plugin", [float(x[name]) for x in got], "dot_product", [float(x[name]) for x in want])
        np.testing.assert_allclose([x[name] for x in got], [x[name] for x in want], rtol=1e-5, err_msg=name)

    ours.initialise()
    ignored = ours.step(ours.batch([without_document_mask(first)]))
    change = abs(float(ignored["loss"]) - float(got[0]["loss"]))
    print(f"segments ignored: the loss moves by {change:.1e}")
    assert change > 1e-4


def test_a_batch_that_maxtext_would_cut_is_refused():
    """MaxText's loss drops rows past its configured batch without a word."""
    cfg = config("precision=fp32")
    model = TrainedModel.__new__(TrainedModel)
    model.config = type("Config", (), {"micro_batch_size_to_train_on": 2, "te_plugin_segment_capacity": 64})
    with pytest.raises(ValueError, match="4 rows .* built for 2"):
        model.batch(batches(cfg, 1, 4))
