"""Rows, segments and weights on their way to MaxText."""

import numpy as np
import pytest

from te_plugin.config import compose
from te_plugin.data import build_data
from te_plugin.maxtext.rows import maxtext_rows
from te_plugin.maxtext.segments import check_segments, segments_of_rows
from te_plugin.maxtext.weights import Layout
from te_plugin.weights import initial_value, llama_weights


@pytest.fixture(scope="module")
def cfg():
    return compose(["recipe=llama_tiny", "model.num_layers=2", "track=jsonl"], for_run=False)


def test_rows_hold_the_batch_and_restart_positions_with_each_segment(cfg):
    batch = build_data(cfg).train_batch(0, 3)
    rows = maxtext_rows(batch)
    ids, positions = rows["inputs_segmentation"], rows["inputs_position"]
    assert np.array_equal(rows["inputs"].reshape(-1), batch.tokens)
    assert segments_of_rows(ids).sum() == batch.segments
    starts = (np.diff(ids, axis=1, prepend=0) != 0) & (ids != 0)
    assert (positions[starts] == 0).all() and (positions[(ids != 0) & ~starts] > 0).all()
    assert np.array_equal(rows["targets_segmentation"].reshape(-1) != 0, batch.labels >= 0)
    assert np.array_equal(rows["targets"].reshape(-1)[batch.labels >= 0], batch.labels[batch.labels >= 0])


def test_too_many_segments_are_refused_naming_row_and_number():
    ids = np.array([[1, 1, 2, 0], [1, 2, 3, 4]])
    check_segments(ids, 4)
    with pytest.raises(ValueError, match="row 1 .* 4 segments.*max_segments_per_seq=3.*at least 4"):
        check_segments(ids, 3)


PATHS = [("token_embedder", "embedding"), ("decoder", "decoder_norm", "scale"), ("decoder", "logits_dense", "kernel")] + [
    ("decoder", "layers", *part)
    for part in (
        [("self_attention", name, "kernel") for name in ("query", "key", "value", "out")]
        + [("mlp", name, "kernel") for name in ("wi_0", "wi_1", "wo")]
        + [(f"{when}_self_attention_layer_norm", "scale") for when in ("pre", "post")]
    )
]


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"query_scale": 128**-0.5}], ids=["plain", "llama3.1", "folded"])
def test_weights_go_to_maxtext_and_back(cfg, options):
    known = llama_weights(cfg.model)
    source = {name: initial_value(weight, 1) for name, weight in known.items()}
    layout = Layout(cfg.model, **options)
    back = {}
    for path in PATHS:
        back.update(layout.to_common(path, layout.to_maxtext(path, source.__getitem__)))
    assert back.keys() == source.keys()
    for name, value in source.items():
        np.testing.assert_allclose(back[name], value, rtol=1e-6 if "q_proj" in name else 0, err_msg=name)


def test_maxtexts_convention_folds_the_softmax_scale_into_the_query(cfg):
    known = llama_weights(cfg.model)
    source = lambda name: initial_value(known[name], 1)  # noqa: E731
    path = ("decoder", "layers", "self_attention", "query", "kernel")
    plain, folded = (Layout(cfg.model, query_scale=s).to_maxtext(path, source) for s in (1.0, cfg.model.head_dim**-0.5))
    np.testing.assert_allclose(folded * cfg.model.head_dim**0.5, plain, rtol=1e-6)


def test_a_parameter_without_a_common_name_is_an_error(cfg):
    with pytest.raises(ValueError, match="decoder/adapter/kernel has no common name"):
        Layout(cfg.model).to_maxtext(("decoder", "adapter", "kernel"), lambda name: None)
