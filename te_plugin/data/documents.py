"""Where text documents come from: the built-in corpus, text files, JSON lines, parquet.

A source lists its files when it is opened (so that a missing path fails at once), iterates over (name, text) pairs in a
fixed order, and has a content hash. The name says where a document stands (file, line or row), because every complaint
about a document must name it.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np

from te_plugin.data.errors import DataError, missing_package

CORPUS = "shakespeare.jsonl.xz"
SUFFIXES = {
    "text": (".txt", ".text", ".md", ".rst"),
    "jsonl": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz"),
    "parquet": (".parquet",),
}
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_ROWS_A_BATCH = 1024  # of parquet


@dataclass(frozen=True)
class TextSource:
    """Documents of one kind (corpus, text, jsonl, parquet) from `files`, in the order of their sorted paths."""

    kind: str
    files: tuple[Path, ...]
    text_field: str = "text"

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)

    def content_hash(self) -> str:
        """Hash of the file contents and of how they are read; not of names or times."""
        digest = hashlib.blake2b(f"{self.kind}\0{self.text_field}".encode(), digest_size=16)
        for file in self.files:
            with _readable(file), file.open("rb") as stream:
                digest.update(file.stat().st_size.to_bytes(8, "little"))
                while block := stream.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        if self.kind == "corpus":
            documents = _corpus()
        elif self.kind == "text":
            documents = ((str(file), _read_text(file)) for file in self.files)
        else:
            read = {"jsonl": _read_json, "parquet": _read_parquet}[self.kind]
            documents = (document for file in self.files for document in read(file, self.text_field))
        for name, text in documents:
            if not text.strip():
                raise DataError(f"document {name} is empty: remove it, or give it text")
            yield name, text


def open_source(kind: str, path: str | None = None, text_field: str = "text") -> TextSource:
    """Find the files of a source. path: a file or a folder (searched with its subfolders, links followed); none for the corpus.

    Raises DataError for an unknown kind, a missing path, a folder without files of the kind, or one with files of the kind that
    would be left out.
    """
    if kind == "corpus":
        if path is not None:
            raise DataError(
                f"data.source=corpus is the text inside the package and takes no data.path (got {path}): use "
                "data.source=text"
            )
        return TextSource(kind, (Path(str(resources.files("te_plugin.data") / "corpus" / CORPUS)),))
    if kind not in SUFFIXES:
        raise DataError(f"data.source={kind!r} is no text source: use corpus, {', '.join(SUFFIXES)}")
    if path is None:
        raise DataError(f"data.source={kind} needs data.path: a file or a folder of {', '.join(SUFFIXES[kind])} files")
    root = Path(path)
    if root.is_file():
        return TextSource(kind, (root,), text_field)
    if not root.is_dir():
        raise DataError(f"data.path={path} {'is neither a file nor a folder' if root.exists() else 'does not exist'}")
    files = _files_under(root, SUFFIXES[kind])
    if not files:
        raise DataError(f"data.path={path} holds no file that ends in {', '.join(SUFFIXES[kind])} (data.source={kind})")
    return TextSource(kind, tuple(files), text_field)


def byte_entropy(texts=None) -> float:
    """Entropy of single-byte frequencies in nats: the loss of the best model that ignores context.

    texts: an iterable of str or bytes; default the built-in corpus.
    """
    counts = np.zeros(256, np.int64)
    for text in (text for _, text in _corpus()) if texts is None else texts:
        raw = text.encode() if isinstance(text, str) else bytes(text)
        counts += np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
    if not counts.any():
        raise DataError("the entropy of no text is undefined")
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


def _files_under(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The visible files with one of the suffixes, sorted; a folder that links reach more than once is read once.

    Nothing of the kind is left out without a word: DataError for a folder that cannot be listed, a link that leads nowhere,
    and a packed file that cannot be read while it is packed (unless its unpacked form lies beside it).
    """
    found, seen = [], set()

    def refuse(error: OSError):
        raise DataError(f"{error.filename} cannot be listed: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        here = os.path.realpath(folder)
        subfolders[:] = [] if here in seen else sorted(name for name in subfolders if not name.startswith("."))
        for name in () if here in seen else names:
            file, lower = Path(folder, name), name.lower()
            if name.startswith("."):
                continue
            if lower.endswith(suffixes):
                if not file.is_file():
                    raise DataError(f"{file} is no file that can be read (a link that leads nowhere?): remove or repair it")
                found.append(file)
            elif lower.endswith(_PACKED) and Path(lower).stem.endswith(suffixes) and Path(name).stem not in names:
                raise DataError(f"{file} is packed in a form that is not read here, and would be left out: unpack or remove it")
        seen.add(here)
    return sorted(found)


@lru_cache(maxsize=1)
def _corpus() -> tuple[tuple[str, str], ...]:
    packed = (resources.files("te_plugin.data") / "corpus" / CORPUS).read_bytes()
    documents = (json.loads(line) for line in lzma.decompress(packed).decode("utf-8").splitlines())
    return tuple((document["id"], document["text"]) for document in documents)


@contextmanager
def _readable(file: Path):
    """A file that cannot be read (permissions, a disk gone) is the user's to fix: say which."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _opener(file: Path):
    return gzip.open if file.name.lower().endswith(".gz") else open


def _read_text(file: Path) -> str:
    with _readable(file):
        raw = file.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        _check_utf8(file)
        raise


def _check_utf8(file: Path) -> None:
    """Raise DataError with the offset of the first byte of `file` (unpacked, if .gz) that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        with _readable(file), _opener(file)(file, "rb") as stream:
            while True:
                block = stream.read(1 << 20)
                waiting = len(decoder.getstate()[0])  # bytes of a character that the last block cut
                try:
                    decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    at = done - waiting + error.start
                    value = error.object[error.start]
                    raise DataError(
                        f"{file} is not UTF-8: byte {at} (0x{value:02x}). Convert the file, or leave it out"
                    ) from None
                done += len(block)
                if not block:
                    return
    except (EOFError, zlib.error) as error:
        raise DataError(f"{file} is no sound gzip file: {error}") from None


def _read_json(file: Path, text_field: str) -> Iterator[tuple[str, str]]:
    """Records of one JSON file. No type is inferred: what other fields hold, and what a text looks like, does not matter."""
    _check_utf8(file)
    number = 0
    for number, record in enumerate(_records(file), 1):
        name = f"{file}, record {number}"
        if text_field not in record:
            raise _no_field(text_field, record, name)
        text = _checked(record[text_field], text_field, name)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name}: field {text_field!r} holds half a character (surrogate {text[error.start]!a}): repair it"
            ) from None
        yield name, text
    if number == 0:
        raise _empty(file)


def _records(file: Path) -> Iterator[dict]:
    """A record a line; where the first line is none by itself, the whole file is one record or a list of them."""
    first = True
    with _opener(file)(file, "rt", encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            problem = "is no JSON object"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record, problem = None, f"is no JSON: {error}"
            if isinstance(record, dict):
                yield record
            elif first and (line.lstrip()[0] == "[" or line.strip() == "{") and (whole := _whole(line + stream.read())):
                yield from whole
                return
            else:
                raise DataError(f"{file} cannot be read as jsonl: line {number} {problem}")
            first = False


def _whole(text: str) -> list[dict]:
    """The records of a text that is one JSON value; none where it is not."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    records = value if isinstance(value, list) else [value]
    return records if all(isinstance(record, dict) for record in records) else []


def _read_parquet(file: Path, text_field: str) -> Iterator[tuple[str, str]]:
    """Rows of one parquet file, a batch at a time. The other columns are not read, so what they hold does not matter."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_package("pyarrow", "data.source=parquet", "data") from None
    row = 0
    try:
        with parquet.ParquetFile(str(file)) as table:
            fields = table.schema_arrow.names
            if text_field not in fields:
                raise _no_field(text_field, fields, str(file))
            if fields.count(text_field) > 1:
                raise DataError(f"{file} has {fields.count(text_field)} columns named {text_field!r}: rename all but one")
            for batch in table.iter_batches(_ROWS_A_BATCH, columns=[text_field]):
                for text in batch.column(text_field).to_pylist():
                    row += 1
                    name = f"{file}, row {row}"
                    yield name, _checked(text, text_field, name)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{file} cannot be read as parquet after row {row}: {error}") from None
    if row == 0:
        raise _empty(file)


def _empty(file: Path) -> DataError:
    return DataError(f"{file} is empty: remove it, or give it documents")


def _no_field(text_field: str, fields, name: str) -> DataError:
    return DataError(f"{name} has no field {text_field!r} (it has: {', '.join(map(str, fields))}): set data.text_field")


def _checked(text, text_field: str, name: str) -> str:
    if not isinstance(text, str):
        kind = "empty (null)" if text is None else f"of type {type(text).__name__}"
        raise DataError(f"{name}: field {text_field!r} is {kind}, expected a string")
    return text
