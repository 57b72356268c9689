"""Megatron's .bin/.idx: round trips, agreement with megatron-core's own reader, and damaged files."""

import numpy as np
import pytest

from te_plugin.data import DataError, read_indexed, store_of, write_indexed


def _same(store, documents):
    assert len(store) == len(documents)
    for number, document in enumerate(documents):
        assert store.read(number).tolist() == document.tolist()


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(384, np.uint16), (65_536, np.uint16), (65_537, np.int32), (128_256, np.int32)]
)
def test_documents_come_back_as_they_were_written(tmp_path, random_documents, vocab, dtype):
    documents = random_documents(vocab=vocab)
    write_indexed(tmp_path / "data", documents, vocab)
    store = read_indexed(tmp_path / "data")
    _same(store, documents)
    assert store.tokens.dtype == dtype and isinstance(store.tokens, np.memmap)
    assert store.read(7, 3, 5).tolist() == documents[7][3:8].tolist()
    assert not list(tmp_path.glob("*.partial"))
    for ending in (".bin", ".idx"):
        _same(read_indexed(tmp_path / f"data{ending}"), documents)


def test_megatron_reads_what_we_write_and_we_read_what_megatron_writes(tmp_path, random_documents):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = random_documents()
    write_indexed(tmp_path / "ours", documents, 384)
    theirs = indexed.IndexedDataset(str(tmp_path / "ours"))
    assert [theirs[n].tolist() for n in range(len(theirs))] == [document.tolist() for document in documents]
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))

    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    for pair in zip(documents[::2], documents[1::2], strict=True):  # two sequences a document
        builder.add_document(np.concatenate(pair), [len(part) for part in pair])
    builder.finalize(str(tmp_path / "theirs.idx"))
    _same(
        read_indexed(tmp_path / "theirs"),
        [np.concatenate(pair) for pair in zip(documents[::2], documents[1::2], strict=True)],
    )


def test_a_store_in_memory_reads_like_one_on_disk(random_documents):
    documents = random_documents()
    _same(store_of(documents), documents)


def test_documents_that_cannot_be_stored_are_named_and_leave_no_file(tmp_path):
    for bad, message in (
        ([], "document 1 is empty"),
        ([3, 384], "document 1 holds id 384, the vocabulary has 384 ids"),
        ([-1], "document 1 holds id -1"),
    ):
        with pytest.raises(DataError, match=message):
            write_indexed(tmp_path / "data", [np.array([1, 2]), np.array(bad, np.int64)], 384)
        assert not (tmp_path / "data.bin").exists() and not (tmp_path / "data.idx").exists()


def _damage(file, change):
    raw = bytearray(file.read_bytes())
    file.write_bytes(change(raw))


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        (".idx", lambda raw: b"", "does not start with MMIDIDX"),
        (".idx", lambda raw: b"TNTIDX\x00\x00\x00" + raw[9:], "does not start with MMIDIDX"),
        (".idx", lambda raw: raw[:9] + b"\x02" + raw[10:], "version 2; version 1 is supported"),
        (".idx", lambda raw: raw[:17] + b"\x07" + raw[18:], "dtype code 7: token ids must be integers"),
        (".idx", lambda raw: raw[:-3], "its header promises"),
        (".idx", lambda raw: raw + bytes(50), "sequence modes"),
        (".idx", lambda raw: raw[:-8] + bytes(8), "must rise from 0 to the number of sequences 50"),
        (".idx", lambda raw: raw[:34] + b"\xff\xff\xff\xff" + raw[38:], "negative or misaligned"),
        (".bin", lambda raw: raw[:-2], "the file is cut"),
        (".bin", lambda raw: raw[:-1], "the file is cut"),
        (".bin", lambda raw: b"", "the file is cut"),
        (".idx", lambda raw: raw[:242] + (2**63 - 2).to_bytes(8, "little") + raw[250:], "needs 92233720.*: the file is cut"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(tmp_path, random_documents, ending, change, message):
    write_indexed(tmp_path / "data", random_documents(), 384)
    _damage(tmp_path / f"data{ending}", lambda raw: change(bytes(raw)))
    with pytest.raises(DataError, match=message):
        read_indexed(tmp_path / "data")


def test_bytes_behind_the_last_document_are_nobodys(tmp_path, random_documents):
    documents = random_documents()
    write_indexed(tmp_path / "data", documents, 384)
    _damage(tmp_path / "data.bin", lambda raw: bytes(raw) + b"\xff\xff\xff")
    store = read_indexed(tmp_path / "data")
    assert all(np.array_equal(store.read(number), document) for number, document in enumerate(documents))


def test_a_missing_half_of_the_pair_is_named(tmp_path, random_documents):
    write_indexed(tmp_path / "data", random_documents(), 384)
    (tmp_path / "data.bin").unlink()
    with pytest.raises(DataError, match=r"there is no file .*data\.bin"):
        read_indexed(tmp_path / "data")


def test_an_empty_document_in_the_index_is_named(tmp_path):
    from te_plugin.data.indexed import write_index

    np.arange(5, dtype=np.uint16).tofile(tmp_path / "data.bin")
    write_index(tmp_path / "data", np.array([3, 0, 2]), np.uint16)
    with pytest.raises(DataError, match=r"document 1 of .*data\.idx is empty"):
        read_indexed(tmp_path / "data")


@pytest.mark.parametrize(
    "document, message", [([1.5, 2.0], "float64"), ([[1, 2], [3, 4]], r"\[2, 2\]"), ([-1, 2], "holds id -1")])
def test_documents_that_are_no_list_of_ids_are_refused(tmp_path, document, message):
    with pytest.raises(DataError, match=message):
        write_indexed(tmp_path / "data", [np.array(document)], 100)


def test_ids_that_no_dtype_holds_are_refused_and_not_wrapped(tmp_path):
    """https://github.com/huggingface/transformers/issues/2825: ids above the dtype became other ids."""
    with pytest.raises(DataError, match=r"below 2\*\*31"):
        write_indexed(tmp_path / "data", [np.array([2**31 + 5])], 2**31 + 6)
    assert not list(tmp_path.iterdir())
