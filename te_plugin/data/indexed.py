"""Megatron's indexed token files: PREFIX.bin holds tokens, PREFIX.idx says where each sequence and document lies. NumPy
only.

Layout of .idx (little endian): 9 bytes "MMIDIDX\\0\\0", uint64 version 1, uint8 dtype code, uint64 sequences, uint64
entries of the document list; then int32 length of each sequence, int64 byte offset of each sequence in .bin, int64
document list (first sequence of each document, and the number of sequences at the end). A trailing int8 mode a sequence
(multimodal data) is not supported.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from te_plugin.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@dataclass(frozen=True)
class TokenStore:
    """Documents of token ids: document d is tokens[starts[d] : starts[d] + lengths[d]]. `tokens` may be a memory
    map."""

    tokens: np.ndarray
    starts: np.ndarray  # int64[D]
    lengths: np.ndarray  # int64[D]

    def __len__(self) -> int:
        return self.lengths.size

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        start = self.starts[document] + offset
        end = self.starts[document] + (self.lengths[document] if length is None else offset + length)
        return self.tokens[start:end]


def store_of(documents: Iterable[np.ndarray]) -> TokenStore:
    """A TokenStore in memory."""
    documents = list(documents)
    lengths = np.array([document.size for document in documents], np.int64)
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.int32)
    return TokenStore(
        tokens=tokens, starts=np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64), lengths=lengths
    )


def read_indexed(path: str | Path) -> TokenStore:
    """Open PREFIX.bin/.idx (path: the prefix or either file). Tokens stay on disk. Raises DataError naming the file and
    the fault."""
    prefix = _prefix(path)
    index_file, token_file = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index_file, token_file):
        if not file.is_file():
            raise DataError(f"data.path={path}: there is no file {file}")
    raw = np.memmap(index_file, np.uint8, mode="r") if index_file.stat().st_size else np.zeros(0, np.uint8)
    if raw.size < _HEADER.size or raw[: len(MAGIC)].tobytes() != MAGIC:
        raise DataError(f"{index_file} is no Megatron index: it does not start with MMIDIDX")
    _, version, code, sequences, entries = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if version != 1:
        raise DataError(f"{index_file} has version {version}; version 1 is supported")
    if code not in _DTYPES:
        raise DataError(f"{index_file} has dtype code {code}: token ids must be integers (codes {sorted(_DTYPES)})")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if raw.size == expected + sequences and sequences:
        raise DataError(f"{index_file} holds sequence modes (multimodal data), which are not supported")
    if raw.size != expected:
        raise DataError(
            f"{index_file} has {raw.size} bytes, its header promises {expected}: the file is cut or damaged"
        )
    sizes, pointers, documents = _sections(raw, sequences, entries)
    dtype = np.dtype(_DTYPES[code])
    if documents.size == 0 or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError(f"{index_file}: the document list must rise from 0 to the number of sequences {sequences}")
    if (sizes < 0).any() or (pointers < 0).any() or (pointers % dtype.itemsize).any():
        raise DataError(f"{index_file} holds negative or misaligned entries: the file is damaged")
    held = token_file.stat().st_size
    if sequences and (pointers > held - sizes * dtype.itemsize).any():  # a sum could overflow
        last = int(np.argmax(pointers))
        needed = int(pointers[last]) + int(sizes[last]) * dtype.itemsize
        raise DataError(f"{token_file} has {held} bytes, {index_file} needs {needed}: the file is cut")
    together = pointers[:-1] + sizes[:-1] * dtype.itemsize == pointers[1:]
    inside = np.ones(max(sequences - 1, 0), bool)
    inside[documents[1:-1][(documents[1:-1] > 0) & (documents[1:-1] < sequences)] - 1] = (
        False  # steps from one document to the next
    )
    if not together[inside].all():
        raise DataError(
            f"{index_file}: the sequences of a document do not follow each other in {token_file}, which is not "
            "supported"
        )
    upto = np.concatenate([[0], np.cumsum(sizes)])
    lengths = upto[documents[1:]] - upto[documents[:-1]]
    for document in np.flatnonzero(lengths == 0)[:1]:
        raise DataError(f"document {document} of {index_file} is empty: rebuild the file without it")
    tokens = np.zeros(0, dtype)
    if held >= dtype.itemsize:
        tokens = np.memmap(token_file, dtype, mode="r", shape=(held // dtype.itemsize,))
    return TokenStore(tokens=tokens, starts=pointers[documents[:-1]] // dtype.itemsize, lengths=lengths)


def write_indexed(path: str | Path, documents: Iterable[np.ndarray], vocab_size: int) -> None:
    """Write documents (1-D integer arrays, one sequence each) as PREFIX.bin/.idx; ids as uint16 where vocab_size
    allows, else int32.

    Files appear under their names only when complete. Raises DataError for an empty document or an id outside the
    vocabulary.
    """
    prefix = _prefix(path)
    dtype = token_dtype(vocab_size)
    lengths = []
    with open(f"{prefix}.bin.partial", "wb") as stream:
        for number, document in enumerate(documents):
            document = np.asarray(document)
            if document.size == 0:
                raise DataError(f"document {number} is empty: leave it out")
            if document.ndim != 1 or document.dtype.kind not in "iu":
                raise DataError(f"document {number} is {document.dtype}{list(document.shape)}: give a list of integer ids")
            wrong = document[(document < 0) | (document >= vocab_size)]
            if wrong.size:
                raise DataError(f"document {number} holds id {wrong[0]}, the vocabulary has {vocab_size} ids")
            stream.write(document.astype(dtype).tobytes())
            lengths.append(document.size)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(f"{prefix}.bin.partial", f"{prefix}.bin")
    write_index(prefix, np.array(lengths, np.int32), dtype)


def write_index(prefix: str | Path, lengths: np.ndarray, dtype) -> None:
    """PREFIX.idx for documents of one sequence each that follow each other in PREFIX.bin; written last and
    atomically."""
    code = next(code for code, known in _DTYPES.items() if np.dtype(known) == np.dtype(dtype))
    count = len(lengths)
    pointers = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[:-1] * np.dtype(dtype).itemsize
    with open(f"{prefix}.idx.partial", "wb") as stream:
        stream.write(_HEADER.pack(MAGIC, 1, code, count, count + 1))
        for section in (np.asarray(lengths, "<i4"), pointers.astype("<i8"), np.arange(count + 1, dtype="<i8")):
            stream.write(section.tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(f"{prefix}.idx.partial", f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else int32. DataError for a vocabulary that neither holds."""
    if vocab_size > 2**31:
        raise DataError(f"a vocabulary of {vocab_size} ids: token files hold ids below 2**31")
    return np.dtype(np.uint16 if vocab_size <= 65536 else np.int32)


def _sections(raw: np.ndarray, sequences: int, entries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, byte offsets and document list as int64."""
    cuts = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * entries])
    parts = (raw[a:b].tobytes() for a, b in zip(cuts[:-1], cuts[1:], strict=True))
    return tuple(
        np.frombuffer(part, kind).astype(np.int64) for part, kind in zip(parts, ("<i4", "<i8", "<i8"), strict=True)
    )


def _prefix(path: str | Path) -> str:
    return str(path).removesuffix(".bin").removesuffix(".idx")
