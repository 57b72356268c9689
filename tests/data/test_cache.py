"""The token cache: right, used again, resumed after a kill, shared by processes, clear when the disk is full."""

import errno
import multiprocessing
import os

import pytest

from te_plugin.data import DataError, load_tokenizer, open_source
from te_plugin.data import cache as cache_module
from te_plugin.data.cache import tokenise, tokenise_to_disk
from te_plugin.data.tokenizers import ByteTokenizer


class _Killed(BaseException):
    pass


class _Counting(ByteTokenizer):
    """Counts documents and can die after some."""

    def __init__(self, die_after=None):
        self.documents, self.die_after = 0, die_after

    def encode_documents(self, texts):
        if self.die_after is not None and self.documents >= self.die_after:
            raise _Killed
        self.documents += len(texts)
        return super().encode_documents(texts)


def _quiet(documents, tokens):
    pass


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(cache_module, "_GROUP", 4)
    monkeypatch.setattr(cache_module, "_CHECKPOINT", 1500)


def _contents(store):
    return [store.read(number).tolist() for number in range(len(store))]


def test_a_cached_entry_equals_the_tokens_and_is_made_once(text_folder, tmp_path):
    source, tokenizer = open_source("text", str(text_folder)), _Counting()
    expected = _contents(tokenise(source, ByteTokenizer(), _quiet))
    store = tokenise_to_disk(source, tokenizer, tmp_path / "cache", _quiet)
    assert _contents(store) == expected and tokenizer.documents == 40
    again = tokenise_to_disk(open_source("text", str(text_folder)), tokenizer, tmp_path / "cache", _quiet)
    assert _contents(again) == expected and tokenizer.documents == 40


def test_a_changed_text_makes_a_new_entry(text_folder, tmp_path):
    tokenise_to_disk(open_source("text", str(text_folder)), _Counting(), tmp_path / "cache", _quiet)
    file = next(text_folder.glob("*.txt"))
    file.write_text("changed\n")
    tokenizer = _Counting()
    store = tokenise_to_disk(open_source("text", str(text_folder)), tokenizer, tmp_path / "cache", _quiet)
    assert tokenizer.documents == 40
    assert [256, *b"changed\n", 257] in _contents(store)


def test_a_killed_run_goes_on_where_the_journal_ends(text_folder, tmp_path):
    source = open_source("text", str(text_folder))
    expected = _contents(tokenise(source, ByteTokenizer(), _quiet))
    with pytest.raises(_Killed):
        tokenise_to_disk(source, _Counting(die_after=28), tmp_path / "cache", _quiet)
    entry = next((tmp_path / "cache").iterdir())
    assert not (entry / "tokens.idx").exists()
    with (entry / "tokens.bin.partial").open("ab") as stream:
        stream.write(b"\x07" * 333)  # a write that the kill cut short
    second = _Counting()
    store = tokenise_to_disk(source, second, tmp_path / "cache", _quiet)
    assert _contents(store) == expected
    assert 12 <= second.documents < 40, "documents in the journal are not tokenised again"
    assert sorted(file.name for file in entry.iterdir()) == ["lock", "tokens.bin", "tokens.idx"]


@pytest.mark.parametrize("journal", ["", "{", "[]", '{"documents": 28}', '{"documents": 28, "tokens": 99999999}'])
def test_a_journal_that_a_crash_damaged_is_not_believed(text_folder, tmp_path, journal):
    source = open_source("text", str(text_folder))
    with pytest.raises(_Killed):
        tokenise_to_disk(source, _Counting(die_after=28), tmp_path / "cache", _quiet)
    (next((tmp_path / "cache").iterdir()) / "journal.json").write_text(journal)
    store = tokenise_to_disk(source, _Counting(), tmp_path / "cache", _quiet)
    assert _contents(store) == _contents(tokenise(source, ByteTokenizer(), _quiet))


def _build(folder, cache, queue):
    tokenizer = _Counting()
    store = tokenise_to_disk(open_source("text", str(folder)), tokenizer, cache, _quiet)
    queue.put((tokenizer.documents, int(store.tokens.sum())))


def test_of_several_processes_one_does_the_work(text_folder, tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_build, args=(text_folder, tmp_path / "cache", queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(documents for documents, _ in results) == [0, 0, 40]
    assert len({total for _, total in results}) == 1


def test_a_full_disk_is_an_error_that_loses_nothing(text_folder, tmp_path, monkeypatch):
    source, real_fsync = open_source("text", str(text_folder)), os.fsync
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device. Work done so far is kept"):
        tokenise_to_disk(source, _Counting(), tmp_path / "cache", _quiet)
    monkeypatch.setattr(os, "fsync", real_fsync)
    second = _Counting()
    store = tokenise_to_disk(source, second, tmp_path / "cache", _quiet)
    assert second.documents < 40
    assert _contents(store) == _contents(tokenise(source, load_tokenizer("bytes"), _quiet))


def test_a_folder_that_cannot_be_made_is_named(text_folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="token cache .* cannot be written"):
        tokenise_to_disk(open_source("text", str(text_folder)), _Counting(), tmp_path / "file", _quiet)
