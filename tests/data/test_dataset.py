"""Batches by row number: random access, resuming, the validation split, reports, and refusals."""

import json
import pwd

import numpy as np
import pytest

from te_plugin.config import ConfigError
from te_plugin.data import (
    DataError,
    build_data,
    cu_seqlens_from_positions,
    make_labels,
    split_for_cp,
    store_of,
    to_bshd,
    write_indexed,
)
from te_plugin.data import dataset as dataset_module
from te_plugin.data.dataset import Data, split_documents
from te_plugin.data.synthetic import best_loss
from te_plugin.data.tokenizers import ByteTokenizer, StoredIds


def _data(documents, seq_len=64, **options):
    return Data(store_of(documents), StoredIds(384), seq_len, **options)


def _equal(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in vars(a))


def _epoch(data, epoch=0):
    return data.train_batch(epoch * data.rows_per_epoch, data.rows_per_epoch)


def test_a_batch_has_the_shapes_and_types_of_the_contract(random_documents):
    data = _data(random_documents(), max_segments=16)
    batch = data.train_batch(3, 4)
    assert batch.rows == 4
    for name, shape, dtype in [
        ("tokens", (256,), np.int32),
        ("labels", (256,), np.int32),
        ("positions", (256,), np.int32),
        ("cu_seqlens", (65,), np.int32),
        ("cu_seqlens_padded", (65,), np.int32),
        ("doc_ids", (64,), np.int64),
    ]:
        array = getattr(batch, name)
        assert array.shape == shape and array.dtype == dtype, name
    used = batch.segments
    assert 0 < used < 64
    assert (batch.cu_seqlens[used:] == batch.cu_seqlens[used]).all()
    assert (batch.cu_seqlens_padded[used:] == 256).all()
    assert (batch.doc_ids[used:] == -1).all() and (batch.doc_ids[:used] >= 0).all()
    assert set(range(0, 256, 64)) <= set(batch.cu_seqlens_padded[:used].tolist()), "every row starts a segment"


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_token_of_every_document_once(random_documents, segments_of, shuffle):
    documents = random_documents()
    data = _data(documents, shuffle=shuffle)
    for epoch in range(2):
        found = {}
        for document, tokens, _, positions in segments_of(_epoch(data, epoch)):
            assert positions == list(range(len(tokens)))
            found.setdefault(document, []).append(tokens)
        assert set(found) == set(range(len(documents)))
        for number, document in enumerate(documents):
            pieces = [document[start : start + 64].tolist() for start in range(0, document.size, 64)]
            assert sorted(found[number]) == sorted(pieces)


def test_labels_and_positions_follow_from_the_segments(random_documents):
    batch = _epoch(_data(random_documents()))
    assert np.array_equal(batch.labels, make_labels(batch.tokens, batch.cu_seqlens, batch.cu_seqlens_padded))
    inside = np.zeros(batch.tokens.size, bool)
    for start, length in zip(batch.cu_seqlens_padded[:-1], np.diff(batch.cu_seqlens), strict=True):
        inside[start : start + length] = True
    assert (batch.positions[~inside] == 0).all() and (batch.labels[~inside] == -100).all()
    full = [row for row in range(batch.rows) if inside[row * 64 : row * 64 + 64].all()]
    positions = batch.positions.reshape(-1, 64)[full]
    starts = [s for s in batch.cu_seqlens_padded if s // 64 in full]
    rebuilt = cu_seqlens_from_positions(positions)[:-1]
    assert rebuilt.size == len(starts)


@pytest.mark.report("huggingface/nanoVLM#204")
def test_a_changed_token_of_one_document_changes_nothing_in_the_others(random_documents, segments_of):
    documents = random_documents()
    before = segments_of(_epoch(_data(documents)))
    documents[5] = (documents[5] + 1) % 384
    after = segments_of(_epoch(_data(documents)))
    assert [one[0] for one in before] == [one[0] for one in after], "order does not depend on the text"
    for (document, *old), (_, *new) in zip(before, after, strict=True):
        assert (old == new) == (document != 5)


def test_rows_are_the_same_however_they_are_asked_for(random_documents):
    data = _data(random_documents())
    whole = data.train_batch(0, 3 * data.rows_per_epoch)
    for row in [0, 1, data.rows_per_epoch - 1, data.rows_per_epoch, 2 * data.rows_per_epoch + 3, 4, 0]:
        one = data.train_batch(row, 1)
        assert np.array_equal(one.tokens, whole.tokens[row * 64 : row * 64 + 64])
        assert np.array_equal(one.labels, whole.labels[row * 64 : row * 64 + 64])


@pytest.mark.report("AI-Hypercomputer/maxdiffusion#484")
def test_resuming_is_asking_for_the_next_row(random_documents):
    documents = random_documents()
    unbroken = _data(documents)
    first = [unbroken.train_batch(step * 4, 4) for step in range(20)]
    resumed = _data(documents)
    for step in range(10, 20):
        assert _equal(resumed.train_batch(step * 4, 4), first[step])
    assert resumed.order_hash(40, first_row=40) == unbroken.order_hash(40, first_row=40)


def test_order_changes_with_seed_and_epoch_and_the_hash_shows_it(random_documents):
    documents = random_documents()
    data = _data(documents)
    rows = data.rows_per_epoch
    assert data.order_hash(rows) == _data(documents).order_hash(rows)
    assert data.order_hash(rows) != data.order_hash(rows, first_row=rows)
    assert data.order_hash(rows) != _data(documents, seed=1235).order_hash(rows)
    assert not np.array_equal(_epoch(data, 0).doc_ids, _epoch(data, 1).doc_ids)
    plain = _data(documents, shuffle=False)
    assert _equal(_epoch(plain, 0), _epoch(plain, 1))


def test_the_order_of_the_corpus_is_frozen(config):
    """Golden curves depend on it: a change here needs every golden curve recorded again."""
    data = build_data(config(seq_len=1024))
    assert data.order_hash(100) == "48b837c8d5b5aaac"


def test_the_token_hash_follows_every_token_and_no_dtype(random_documents, monkeypatch):
    documents = random_documents()
    first = _data(documents).token_hash()
    assert _data([document.astype(np.uint16) for document in documents]).token_hash() == first
    changed = [document.copy() for document in documents]
    changed[7][-1] ^= 1
    assert _data(changed).token_hash() != first and _data(changed).order_hash(9) == _data(documents).order_hash(9)
    monkeypatch.setattr(dataset_module, "_HASHED_AT_MOST", 64)
    monkeypatch.setattr(dataset_module, "_HASHED_BLOCK", 8)
    assert _data(documents).token_hash() != first  # blocks of it


@pytest.mark.report("PrimeIntellect-ai/prime-rl#1957")
def test_loss_tokens_differ_between_ranks_and_add_up_to_the_whole_batch(random_documents):
    data = _data(random_documents())
    whole = data.train_batch(0, 8)
    ranks = [data.train_batch(row, 2) for row in range(0, 8, 2)]
    counts = [rank.loss_tokens for rank in ranks]
    assert len(set(counts)) > 1, "a mean of the ranks' means would weigh tokens unequally"
    assert sum(counts) == whole.loss_tokens == int((whole.labels != -100).sum())
    assert np.array_equal(np.concatenate([rank.labels for rank in ranks]), whole.labels)


def test_validation_documents_are_held_out_and_the_same_for_every_seed(random_documents):
    documents = random_documents()
    data, other = _data(documents, val_fraction=0.2), _data(documents, val_fraction=0.2, seed=9)
    train = set(_epoch(data).doc_ids.tolist()) - {-1}
    val = set(data.val_batch(0, data.val_rows).doc_ids.tolist()) - {-1}
    assert len(val) == 10 and train | val == set(range(50)) and not train & val
    assert _equal(data.val_batch(0, data.val_rows), other.val_batch(0, other.val_rows))
    with pytest.raises(DataError, match=f"there are {data.val_rows}: lower schedule.eval_rows"):
        data.val_batch(0, data.val_rows + 1)


@pytest.mark.parametrize(("count", "fraction", "expected"), [(10, 0.0, 0), (10, 0.05, 1), (2, 0.9, 1), (100, 0.25, 25)])
def test_the_split_keeps_a_document_on_each_side(count, fraction, expected):
    train, val = split_documents(count, fraction)
    assert val.size == expected and sorted([*train, *val]) == list(range(count))


@pytest.mark.parametrize(
    ("count", "fraction", "message"),
    [
        (0, 0.0, "no documents"),
        (1, 0.1, "one document cannot be split"),
        (5, 1.0, "less than 1"),
        (5, -0.1, "at least 0"),
    ],
)
def test_splits_that_cannot_be_are_refused(count, fraction, message):
    with pytest.raises(DataError, match=message):
        split_documents(count, fraction)


def test_padded_rows_hold_the_same_segments_in_the_same_order(random_documents, segments_of):
    batch = _data(random_documents(), max_segments=16).train_batch(2, 6)
    padded = to_bshd(batch, 64, pad_id=7)
    segments = segments_of(batch)
    assert padded.tokens.shape == padded.labels.shape == padded.positions.shape == (len(segments), 64)
    for row, (_, tokens, labels, positions) in enumerate(segments):
        length = padded.lengths[row]
        assert padded.tokens[row].tolist() == tokens + [7] * (64 - length)
        assert padded.labels[row].tolist() == labels + [-100] * (64 - length)
        assert padded.positions[row, :length].tolist() == positions
    with pytest.raises(DataError, match="does not fit a padded row of 32"):
        to_bshd(batch, 32)


def test_the_report_counts_what_the_batches_hold(random_documents):
    documents = random_documents(longest=150)
    data = _data(documents, val_fraction=0.1)
    report, epoch = data.report(), _epoch(data)
    assert report["documents"] == 50 and report["train_documents"] == 45 and report["val_documents"] == 5
    assert report["tokens"] == sum(map(len, documents))
    assert report["segments"] == epoch.segments
    assert report["fill"] == round(int(epoch.cu_seqlens[-1]) / epoch.tokens.size, 4)
    assert report["loss_tokens_per_epoch"] == epoch.loss_tokens
    train = [documents[n] for n in sorted(set(epoch.doc_ids.tolist()) - {-1})]
    assert report["documents_cut"] == sum(len(document) > 64 for document in train)
    assert report["pieces_of_cut_documents"] == sum(-(-len(d) // 64) for d in train if len(d) > 64)
    per_row = np.bincount(epoch.cu_seqlens_padded[: epoch.segments] // 64)
    assert report["segments_per_row_max"] == per_row.max()
    json.dumps(report)


def test_the_corpus_packs_above_95_percent(config):
    for seq_len in (512, 1024, 4096):
        report = build_data(config(seq_len=seq_len)).report()
        assert report["fill"] > 0.98 and not report["synthetic"]
        assert report["fill"] > 1.2 * report["fill_one_document_a_row"]


def test_context_parallel_batches_can_be_split_as_they_are(config):
    data = build_data(config(seq_len=256, context_parallel=2))
    batch = data.train_batch(0, 2)
    shards = [split_for_cp(batch.cu_seqlens, batch.cu_seqlens_padded, 2, rank) for rank in range(2)]
    assert sorted(np.concatenate([shard.rows for shard in shards])) == list(range(512))
    assert sum(int(shard.cu_seqlens[-1]) for shard in shards) == batch.cu_seqlens[-1]
    assert data.report()["alignment"] == 4


def test_text_json_parquet_and_indexed_files_of_the_same_documents_give_the_same_rows(config, tmp_path, texts):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("text", "json", "parquet"):
        (tmp_path / name).mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number:03d}.txt").write_text(text)
    (tmp_path / "json" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "parquet" / "a.parquet")
    write_indexed(tmp_path / "tokens", ByteTokenizer().encode_documents(texts), 384)
    batches = [
        build_data(config(source, tmp_path / path)).train_batch(0, 8)
        for source, path in [("text", "text"), ("jsonl", "json"), ("parquet", "parquet"), ("megatron", "tokens")]
    ]
    for other in batches[1:]:
        for name in ("labels", "positions", "cu_seqlens", "cu_seqlens_padded", "doc_ids"):
            assert np.array_equal(getattr(other, name), getattr(batches[0], name)), name


def test_a_hugging_face_tokenizer_makes_the_rows(config, hf_folder, text_folder):
    folder = hf_folder()
    data = build_data(config("text", text_folder, vocab_size=400, tokenizer="hf", tokenizer_path=str(folder)))
    batch = data.train_batch(0, 4)
    assert data.report()["tokenizer"] == f"hf:{folder.name}" and data.report()["bos"] is True
    starts = batch.cu_seqlens_padded[: batch.segments]
    assert set(batch.tokens[starts].tolist()) == {0}, "every document starts with <s>"


def test_a_user_without_a_home_directory_keeps_the_tokens_in_memory(config, text_folder, monkeypatch):
    """A container's user number that no password file knows: https://github.com/dottxt-ai/outlines/pull/1425"""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert build_data(config("text", text_folder)).report()["token_cache"] == "none (small input)"
    monkeypatch.setattr(dataset_module, "PAYS_FROM", 1000)
    assert build_data(config("text", text_folder)).report()["token_cache"] == "none (this user has no home directory)"


def test_large_text_goes_through_the_token_cache_and_small_text_does_not(config, text_folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    small = build_data(config("text", text_folder), cache_folder=cache)
    assert not cache.exists() and small.report()["token_cache"] == "none (small input)"
    monkeypatch.setattr(dataset_module, "PAYS_FROM", 1000)
    large = build_data(config("text", text_folder), cache_folder=cache)
    assert large.report()["token_cache"] == str(cache) and len(list(cache.iterdir())) == 1
    assert _equal(large.train_batch(0, 4), small.train_batch(0, 4))
    (tmp_path / "file").write_text("in the way")
    refused = build_data(config("text", text_folder), cache_folder=tmp_path / "file" / "cache")
    assert refused.report()["token_cache"].startswith("none (") and "Not a directory" in refused.report()["token_cache"]
    assert _equal(refused.train_batch(0, 4), small.train_batch(0, 4))


def test_synthetic_data_must_be_asked_for_and_says_so(config):
    data = build_data(config("synthetic", seq_len=128))
    report = data.report()
    assert (
        report["synthetic"] is True and "not text" in report["note"] and report["best_loss"] == round(best_loss(384), 4)
    )
    batch = data.train_batch(0, 16)
    assert np.array_equal(build_data(config("synthetic", seq_len=128)).train_batch(0, 16).tokens, batch.tokens)
    predicted = batch.labels != -100
    inside = predicted & (batch.labels != 383)
    follows = (batch.labels == (batch.tokens + 1) % 383)[inside].mean()
    assert 0.7 < follows < 0.8, "three ids in four follow from the one before"
    with pytest.raises(DataError, match="takes no data.path"):
        build_data(config("synthetic", "somewhere"))


def test_an_id_outside_the_vocabulary_is_named_with_its_document(config, tmp_path):
    documents = [np.arange(10), np.arange(90, 120), np.array([4, 512, 3])]
    write_indexed(tmp_path / "data", documents, 1000)
    with pytest.raises(DataError, match="document 2 holds token id 512 at its token 1, but the vocabulary has 384 ids"):
        build_data(config("megatron", tmp_path / "data"))
    data = build_data(config("megatron", tmp_path / "data", vocab_size=513))
    assert data.vocab_size == 513


def test_ids_of_a_store_too_large_to_scan_are_checked_in_each_batch(monkeypatch):
    monkeypatch.setattr(dataset_module, "_CHECKED_AT_START", 1)
    data = _data([np.array([1, 400, 2])])
    assert data.report()["ids_checked"] == "batch by batch"
    with pytest.raises(DataError, match="document 0 holds token id 400 at its token 1"):
        data.train_batch(0, 1)


def test_a_vocabulary_too_small_for_the_tokenizer_is_a_config_error(config):
    with pytest.raises(ConfigError, match="data.tokenizer=bytes has 384 ids, model.vocab_size=256 has fewer"):
        build_data(config(vocab_size=256))


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("text", None, "needs data.path"),
        ("megatron", None, "needs data.path"),
        ("megatron", "missing", "there is no file"),
        ("text", "missing", "does not exist"),
        ("wikipedia", "missing", "no text source"),
    ],
)
def test_sources_without_data_are_refused(config, tmp_path, source, path, message):
    with pytest.raises(DataError, match=message):
        build_data(config(source, None if path is None else tmp_path / path))


@pytest.mark.parametrize(("first", "rows"), [(-1, 2), (0, 0), (3, -1)])
def test_rows_that_do_not_exist_are_refused(random_documents, first, rows):
    data = _data(random_documents(), val_fraction=0.1)
    for method in (data.train_batch, data.val_batch):
        with pytest.raises(DataError, match="rows"):
            method(first, rows)


def test_the_row_capacity_is_a_hard_limit(random_documents):
    documents = random_documents(count=200, longest=6)
    data = _data(documents, max_segments=3)
    batch = _epoch(data)
    assert np.bincount(batch.cu_seqlens_padded[: batch.segments] // 64).max() == 3
    assert batch.segments == 200 and data.rows_per_epoch == 67
