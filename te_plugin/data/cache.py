"""Tokenised documents on disk, for inputs that are slow to tokenise again.

An entry is a folder named by what decides its content: hash of the text files, tokenizer fingerprint, format version.
It holds tokens.bin and tokens.idx (indexed.py). A run that is killed half-way leaves tokens.bin.partial and a journal
of what is safely on disk; the next run goes on from there. tokens.idx is renamed into place last, so an entry is
complete or not there. A file lock lets one process of many do the work while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import contextmanager
from itertools import batched, islice
from pathlib import Path

import numpy as np

from te_plugin.data.documents import TextSource
from te_plugin.data.errors import DataError
from te_plugin.data.indexed import TokenStore, read_indexed, store_of, token_dtype, write_index
from te_plugin.data.tokenizers import Tokenizer

FORMAT = 1
PAYS_FROM = 32 << 20  # bytes of text; less is tokenised again faster than a user would want files of
_GROUP = 64  # documents a tokenizer call
_CHECKPOINT = 4 << 20  # tokens between two journal entries
_NOTHING = {"documents": 0, "tokens": 0}


def default_folder() -> Path | None:
    """None for a user without a home directory: a container's user number that no password file knows, with HOME unset."""
    try:
        return Path.home() / ".cache" / "te_plugin" / "tokens"
    except RuntimeError:
        return None


def tokenise(source: TextSource, tokenizer: Tokenizer, progress: Callable[[int, int], None]) -> TokenStore:
    """All documents in memory. progress(documents, tokens) is called as work gets done."""
    documents: list[np.ndarray] = []
    for group in batched((text for _, text in source), _GROUP):
        encoded = tokenizer.encode_documents(group)
        documents.extend(encoded)
        progress(len(group), sum(map(len, encoded)))
    return store_of(documents)


def cannot_write(folder: Path | None) -> str | None:
    """Why nothing can be cached under `folder` (a home directory that is read-only, say); None when it can."""
    if folder is None:
        return "this user has no home directory"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder}: not writable"


def tokenise_to_disk(
    source: TextSource, tokenizer: Tokenizer, folder: Path, progress: Callable[[int, int], None]
) -> TokenStore:
    """The cached entry of (source, tokenizer) under `folder`, made or completed if need be. Tokens are a memory map."""
    entry = folder / _entry_name(source, tokenizer)
    try:
        entry.mkdir(parents=True, exist_ok=True)
        with _locked(entry / "lock"):
            if not (entry / "tokens.idx").is_file():
                _complete(source, tokenizer, entry, progress)
    except OSError as error:
        raise DataError(
            f"the token cache {entry} cannot be written: {error.strerror or error}. Work done so far is kept; free "
            "space or fix the "
            "permissions and start again"
        ) from error
    return read_indexed(entry / "tokens")


def _entry_name(source: TextSource, tokenizer: Tokenizer) -> str:
    return hashlib.blake2b(
        f"{FORMAT}\0{source.content_hash()}\0{tokenizer.fingerprint}".encode(), digest_size=16
    ).hexdigest()


def _complete(source: TextSource, tokenizer: Tokenizer, entry: Path, progress: Callable[[int, int], None]) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    journal, tokens_file, lengths_file = entry / "journal.json", entry / "tokens.bin.partial", entry / "lengths.partial"
    done = _recorded(journal)
    kept = ((tokens_file, done["tokens"] * dtype.itemsize), (lengths_file, done["documents"] * 4))
    if any(not file.is_file() or file.stat().st_size < size for file, size in kept):
        done, kept = dict(_NOTHING), ((tokens_file, 0), (lengths_file, 0))
    progress(done["documents"], done["tokens"])
    for file, size in kept:
        with file.open("ab") as stream:
            stream.truncate(size)  # what was written after the last journal entry is done again
    with tokens_file.open("ab") as tokens, lengths_file.open("ab") as lengths:
        pending = 0
        for group in batched((text for _, text in islice(iter(source), done["documents"], None)), _GROUP):
            encoded = tokenizer.encode_documents(group)
            tokens.write(np.concatenate(encoded).astype(dtype).tobytes())
            lengths.write(np.array([len(ids) for ids in encoded], "<i4").tobytes())
            count = sum(map(len, encoded))
            done = {"documents": done["documents"] + len(group), "tokens": done["tokens"] + count}
            progress(len(group), count)
            pending += count
            if pending >= _CHECKPOINT:
                _record(journal, done, tokens, lengths)
                pending = 0
        _record(journal, done, tokens, lengths)
    os.replace(tokens_file, entry / "tokens.bin")
    write_index(entry / "tokens", np.fromfile(lengths_file, "<i4"), dtype)
    lengths_file.unlink()
    journal.unlink()


def _recorded(journal: Path) -> dict:
    """What is done. A crash of the machine can leave the journal empty or cut: then nothing is, and the work starts again."""
    try:
        done = json.loads(journal.read_text(encoding="utf-8"))
        return {key: int(done[key]) for key in _NOTHING}
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return dict(_NOTHING)


def _record(journal: Path, done: dict, *streams) -> None:
    for stream in streams:
        stream.flush()
        os.fsync(stream.fileno())
    new = journal.with_suffix(".new")
    new.write_text(json.dumps(done), encoding="utf-8")
    os.replace(new, journal)


@contextmanager
def _locked(file: Path):
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released when the file closes, also when the process is killed
        yield
