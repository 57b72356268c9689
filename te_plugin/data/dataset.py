"""Packed batches by row number: the data of a run.

Row r of training is row r % rows_per_epoch of epoch r // rows_per_epoch; an epoch's order is a pure function of
(data.seed, epoch), so resuming is asking for the next row and no iterator state exists. Validation documents are chosen
by their number alone, the same for every seed, and come in one fixed order.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from te_plugin.data import packing, synthetic
from te_plugin.data.batch import Batch
from te_plugin.data.cache import PAYS_FROM, cannot_write, default_folder, tokenise, tokenise_to_disk
from te_plugin.data.documents import open_source
from te_plugin.data.errors import DataError
from te_plugin.data.indexed import TokenStore, read_indexed
from te_plugin.data.progress import Progress
from te_plugin.data.segments import IGNORED
from te_plugin.data.tokenizers import StoredIds, Tokenizer, load_tokenizer

_SPLIT_KEY = 7  # the validation split never depends on data.seed: losses of different seeds stay comparable
_CHECKED_AT_START = 1 << 30  # tokens; larger stores have their ids checked batch by batch only
_HASHED_AT_MOST, _HASHED_BLOCK = 1 << 28, 1 << 20  # tokens


class Split:
    """The pieces of some documents and their rows in any epoch."""

    def __init__(self, store: TokenStore, documents: np.ndarray, seq_len: int, align: int, max_segments: int):
        self.documents, self.max_segments = documents, max_segments
        self.pieces = packing.cut_into_pieces(store.lengths[documents], seq_len, align)
        self.plan = packing.plan_rows(self.pieces.padded, seq_len, max_segments)
        self._orders = lru_cache(maxsize=2)(lambda key: packing.deal(self.pieces.padded, self.plan, key))

    @property
    def rows(self) -> int:
        return self.plan.rows

    def row(self, row: int, key: tuple[int, ...] | None) -> np.ndarray:
        """Pieces of one row, in order."""
        order = self._orders(key)
        return order.pieces[order.row_start[row] : order.row_start[row + 1]]


class Data:
    """Random access to packed rows. Made by build_data; see the module head for what a row number means."""

    def __init__(
        self,
        store: TokenStore,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        vocab_size: int | None = None,
        align: int = 1,
        max_segments: int = 64,
        seed: int = 1234,
        shuffle: bool = True,
        val_fraction: float = 0.0,
        origin: dict | None = None,
    ):
        self.store, self.tokenizer, self.seq_len, self.align = store, tokenizer, seq_len, align
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.max_segments, self.seed, self.shuffle = max_segments, seed, shuffle
        self._origin = origin or {}
        train, val = split_documents(len(store), val_fraction)
        self._train = Split(store, train, seq_len, align, max_segments)
        self._val = Split(store, val, seq_len, align, max_segments)
        if store.tokens.size <= _CHECKED_AT_START:
            self._check_ids(store.tokens)

    @property
    def rows_per_epoch(self) -> int:
        """Training rows an epoch, the same in every epoch."""
        return self._train.rows

    @property
    def val_rows(self) -> int:
        return self._val.rows

    def train_batch(self, first_row: int, rows: int) -> Batch:
        """Rows first_row .. first_row + rows - 1 of the endless training sequence."""
        if first_row < 0 or rows < 1:
            raise DataError(
                f"train_batch(first_row={first_row}, rows={rows}): rows start at 0 and a batch has at least one"
            )
        return self._batch(self._train, [self._train_row(row) for row in range(first_row, first_row + rows)])

    def val_batch(self, first_row: int, rows: int) -> Batch:
        """Validation rows; raises DataError past the last one (val_rows), so that no row is counted twice."""
        if first_row < 0 or rows < 1 or first_row + rows > self.val_rows:
            raise DataError(
                f"validation rows {first_row} to {first_row + rows - 1} asked for, there are {self.val_rows}: "
                "lower schedule.eval_rows or raise data.val_fraction"
            )
        return self._batch(self._val, [self._val.row(row, (_SPLIT_KEY,)) for row in range(first_row, first_row + rows)])

    def order_hash(self, rows: int, first_row: int = 0) -> str:
        """Hash of the document, offset and length of every segment of the training rows: equal hashes, equal order."""
        digest = hashlib.sha256()
        for row in range(first_row, first_row + rows):
            chosen = self._train_row(row)
            pieces = self._train.pieces
            place = (self._train.documents[pieces.document[chosen]], pieces.offset[chosen], pieces.length[chosen])
            digest.update(np.stack(place).astype("<i8").tobytes() + b"|")
        return digest.hexdigest()[:16]

    def token_hash(self) -> str:
        """Hash of the token ids: order_hash says from where rows take them, this what they are. Of stores with more than 2**28
        tokens evenly spaced blocks are read."""
        tokens, digest = self.store.tokens, hashlib.blake2b(str(self.store.tokens.size).encode(), digest_size=8)
        step = max(_HASHED_BLOCK, tokens.size // (_HASHED_AT_MOST // _HASHED_BLOCK))
        for start in range(0, tokens.size, step):
            digest.update(tokens[start : start + _HASHED_BLOCK].astype("<i8").tobytes())
        return digest.hexdigest()

    def report(self) -> dict:
        """What the data is and how well it packs: plain values, for run.json, the console and the README."""
        train, lengths = self._train, self.store.lengths
        pieces = train.pieces
        capacity = train.rows * self.seq_len
        segments = np.bincount(train.plan.slot_row, minlength=max(train.rows, 1))
        loss_tokens = int((pieces.length - 1).sum())
        return self._origin | {
            "documents": len(self.store),
            "train_documents": train.documents.size,
            "val_documents": self._val.documents.size,
            "tokens": int(lengths.sum()),
            "document_tokens_median": int(np.median(lengths)),
            "document_tokens_max": int(lengths.max()),
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
            "rows_per_epoch": train.rows,
            "val_rows": self._val.rows,
            "fill": round(float(pieces.length.sum() / capacity), 4),
            "fill_one_document_a_row": round(float(pieces.length.sum() / (len(pieces) * self.seq_len)), 4),
            "segments": len(pieces),
            "segments_per_row_mean": round(len(pieces) / train.rows, 2),
            "segments_per_row_max": int(segments.max()),
            "max_segments": self.max_segments,
            "documents_cut": int(np.unique(pieces.document[pieces.offset > 0]).size),
            "pieces_of_cut_documents": int(
                (np.bincount(pieces.document)[np.unique(pieces.document[pieces.offset > 0])]).sum()
            ),
            "loss_tokens_per_epoch": loss_tokens,
            "alignment": self.align,
            "ids_checked": "all" if self.store.tokens.size <= _CHECKED_AT_START else "batch by batch",
        }

    def _train_row(self, row: int) -> np.ndarray:
        epoch, inside = divmod(row, self.rows_per_epoch)
        return self._train.row(inside, (self.seed, epoch) if self.shuffle else None)

    def _batch(self, split: Split, rows: list[np.ndarray]) -> Batch:
        total, capacity = len(rows) * self.seq_len, len(rows) * self.max_segments
        tokens = np.full(total, self.tokenizer.pad_id, np.int32)
        labels = np.full(total, IGNORED, np.int32)
        positions = np.zeros(total, np.int32)
        starts = np.full(capacity + 1, total, np.int64)
        lengths = np.zeros(capacity, np.int64)
        doc_ids = np.full(capacity, -1, np.int64)
        at = 0
        for number, chosen in enumerate(rows):
            start = number * self.seq_len
            for piece in chosen:
                document = int(split.documents[split.pieces.document[piece]])
                length = int(split.pieces.length[piece])
                ids = self.store.read(document, int(split.pieces.offset[piece]), length)
                self._check_ids(ids, document)
                tokens[start : start + length] = ids
                labels[start : start + length - 1] = ids[1:]
                positions[start : start + length] = np.arange(length)
                starts[at], lengths[at], doc_ids[at] = start, length, document
                start += int(split.pieces.padded[piece])
                at += 1
        return Batch(
            tokens=tokens,
            labels=labels,
            positions=positions,
            cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            cu_seqlens_padded=starts.astype(np.int32),
            doc_ids=doc_ids,
            rows=len(rows),
        )

    def _check_ids(self, ids: np.ndarray, document: int | None = None) -> None:
        """DataError for a token id outside the vocabulary, naming the document and the place."""
        step = 1 << 24
        for start in range(0, ids.size, step):
            block = ids[start : start + step]
            if block.max() < self.vocab_size and block.min() >= 0:
                continue
            at = start + int(np.argmax((block >= self.vocab_size) | (block < 0)))
            if document is None:
                owners = np.flatnonzero((self.store.starts <= at) & (at < self.store.starts + self.store.lengths))
                if not owners.size:  # bytes between documents are nobody's
                    continue
                document, place = int(owners[0]), at - int(self.store.starts[owners[0]])
            else:
                place = at
            raise DataError(
                f"document {document} holds token id {ids[at]} at its token {place}, but the vocabulary has "
                f"{self.vocab_size} ids: "
                "choose the tokenizer that made the data, or a model with its vocabulary"
            )


def split_documents(count: int, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Document numbers for training and validation, both rising; at least one each when val_fraction > 0."""
    if not 0 <= val_fraction < 1:
        raise DataError(f"data.val_fraction={val_fraction} must be at least 0 and less than 1")
    if count == 0:
        raise DataError("there are no documents to train on")
    if val_fraction == 0:
        return np.arange(count), np.zeros(0, np.int64)
    if count == 1:
        raise DataError(
            "one document cannot be split into training and validation: add documents, or set data.val_fraction=0"
        )
    wanted = min(max(1, round(count * val_fraction)), count - 1)
    order = np.argsort(packing.hashed(count, _SPLIT_KEY), kind="stable")
    return np.sort(order[wanted:]), np.sort(order[:wanted])


def build_data(cfg, cache_folder: Path | None = None) -> Data:
    """The data of a run from its Config (groups data, layout, parallel, model).

    Text that is large enough to be worth it is tokenised once into cache_folder (default ~/.cache/te_plugin/tokens).
    Raises DataError, or ConfigError where two fields contradict each other.
    """
    from te_plugin.config import ConfigError  # the schema library is needed for configs only

    data = cfg.data
    if data.source in ("megatron", "synthetic"):  # ids already: no tokenizer is needed, nor its files
        tokenizer = StoredIds(cfg.model.vocab_size)
    else:
        tokenizer = load_tokenizer(data.tokenizer, data.tokenizer_path)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer} has {tokenizer.vocab_size} ids, "
            f"model.vocab_size={cfg.model.vocab_size} has fewer: "
            f"set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    store, origin = _open(data, tokenizer, default_folder() if cache_folder is None else cache_folder)
    return Data(
        store,
        tokenizer,
        data.seq_len,
        align=packing.alignment(1, cfg.parallel.context_parallel),
        max_segments=cfg.layout.max_segments,
        seed=data.seed,
        shuffle=data.shuffle,
        val_fraction=data.val_fraction,
        origin=origin,
    )


def _open(data, tokenizer: Tokenizer, cache_folder: Path | None) -> tuple[TokenStore, dict]:
    origin = {"source": data.source, "path": data.path, "synthetic": data.source == "synthetic"}
    if data.source == "synthetic":
        if data.path is not None:
            raise DataError(f"data.source=synthetic makes its own tokens and takes no data.path (got {data.path})")
        note = {"note": synthetic.NOTE, "best_loss": round(synthetic.best_loss(tokenizer.vocab_size), 4)}
        return synthetic.synthetic_documents(tokenizer.vocab_size, data.seq_len), origin | note
    if data.source == "megatron":
        if data.path is None:
            raise DataError("data.source=megatron needs data.path: the common prefix of the .bin and .idx files")
        return read_indexed(data.path), origin | {"bos": "as stored", "eos": "as stored"}
    source = open_source(data.source, data.path, data.text_field)
    origin |= {"files": len(source.files), "bos": tokenizer.bos_id is not None, "eos": True}
    cached, cache = False, "none (small input)"
    if data.source != "corpus" and source.size >= PAYS_FROM:
        reason = cannot_write(cache_folder)
        cached, cache = reason is None, str(cache_folder) if reason is None else f"none ({reason})"
    with Progress(f"tokenising {data.source} with {tokenizer.name}") as progress:
        if cached:
            store = tokenise_to_disk(source, tokenizer, cache_folder, progress)
        else:
            store = tokenise(source, tokenizer, progress)
    return store, origin | {"token_cache": cache}
