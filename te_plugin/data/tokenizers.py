"""Tokenizers: bytes, Llama-3, or any Hugging Face tokenizer folder.

Policy, the same for all: a document is [BOS] + its text + EOS. EOS always ends it; BOS starts it where the tokenizer
has that habit (bytes and Llama-3 do; a Hugging Face tokenizer is asked by encoding a letter). Special tokens spelt out
in a text are ordinary text: no document can end itself early.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from te_plugin.data.errors import DataError, missing_package

KINDS = ("bytes", "llama3", "hf")
_RARE = "\U00012000"  # a letter (cuneiform) that only vocabularies of bytes can spell
_LLAMA3_RANKS, _LLAMA3_SPECIALS = 128_000, 256
# The split of Llama-3 is part of the vocabulary's definition and not in tokenizer.model.
_LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class Tokenizer:
    """What packing needs to know. `fingerprint` changes whenever the same text would give other ids."""

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    fingerprint: str

    def encode_text(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without BOS and EOS, int32."""
        raise NotImplementedError

    def decode(self, ids) -> str:
        """Text of ids; special ids are left out."""
        raise NotImplementedError

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """[BOS] + ids + EOS of each text, int32."""
        head = [] if self.bos_id is None else [self.bos_id]
        return [np.concatenate([head, ids, [self.eos_id]]).astype(np.int32) for ids in self.encode_text(texts)]


class ByteTokenizer(Tokenizer):
    """256 bytes of UTF-8, then BOS, EOS, PAD; the vocabulary is padded to 384 so that FP8 and tensor-parallel multiples
    hold."""

    name, vocab_size, bos_id, eos_id, pad_id, fingerprint = "bytes", 384, 256, 257, 258, "bytes-384-v1"

    def encode_text(self, texts):
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids):
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


class Llama3Tokenizer(Tokenizer):
    """The Llama-3 vocabulary through tiktoken, from a `tokenizer.model` file: 128,000 ranks and 256 special ids."""

    name, bos_id, eos_id, pad_id = "llama3", _LLAMA3_RANKS, _LLAMA3_RANKS + 1, _LLAMA3_RANKS + 4
    vocab_size = _LLAMA3_RANKS + _LLAMA3_SPECIALS

    def __init__(self, path: str | None = None):
        file = _llama3_file(path)
        try:
            import tiktoken
        except ImportError:
            raise missing_package("tiktoken", "data.tokenizer=llama3", "llama3") from None
        raw = file.read_bytes()
        self.fingerprint = "llama3-" + hashlib.sha256(raw).hexdigest()[:16]
        try:
            ranks = {
                base64.b64decode(token): int(rank)
                for token, rank in (line.split() for line in raw.splitlines() if line)
            }
        except ValueError as error:
            raise DataError(f"{file} is no tiktoken vocabulary (lines of base64 and rank): {error}") from None
        if len(ranks) != _LLAMA3_RANKS:
            raise DataError(
                f"{file} holds {len(ranks)} tokens, Llama-3 has {_LLAMA3_RANKS}: give the tokenizer.model of Llama-3"
            )
        self._encoding = tiktoken.Encoding("llama3", pat_str=_LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})

    def encode_text(self, texts):
        return [
            np.concatenate([self._encoding.encode_ordinary(part) for part in _digestible(text)]).astype(np.int32)
            for text in texts
        ]

    def decode(self, ids):
        return self._encoding.decode([int(i) for i in ids if i < _LLAMA3_RANKS])


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer folder with tokenizer.json, as `save_pretrained` writes it."""

    def __init__(self, path: str | None):
        if path is None:
            raise DataError("data.tokenizer=hf needs data.tokenizer_path: a folder with tokenizer.json")
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f"data.tokenizer_path={path} holds no tokenizer.json. Older folders: "
                "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW) writes one"
            )
        try:
            import tokenizers
        except ImportError:
            raise missing_package("tokenizers", "data.tokenizer=hf", "data") from None
        raw = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for a bad file; nothing is computed here
            raise DataError(f"{file} cannot be read as a tokenizer: {error}") from None
        if getattr(self._tokenizer.model, "dropout", None):
            raise DataError(
                f"{file} has dropout={self._tokenizer.model.dropout}: a text would get other ids at every reading, and on every "
                'process. Set "dropout" to null there'
            )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = f"hf:{folder.name}"
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        special = _special_tokens(folder)
        eos = self._id_of(special.get("eos_token"))
        if eos is None:
            raise DataError(
                f"{folder} names no eos_token (tokenizer_config.json): documents could not be told apart. Add one"
            )
        self.eos_id = eos
        bos = self._id_of(special.get("bos_token"))
        starts_with_bos = self._encode(["a"], special=True)[0][:1] == [bos]  # what its own post-processor does
        self.bos_id = bos if starts_with_bos else None
        pad = self._id_of(special.get("pad_token"))
        self.pad_id = eos if pad is None else pad
        self.fingerprint = "hf-" + hashlib.sha256(raw + f"{self.bos_id},{self.eos_id}".encode()).hexdigest()[:16]
        self._tokenizer.encode_special_tokens = True  # spelt-out special tokens are text
        model = self._tokenizer.model
        if isinstance(model, tokenizers.models.BPE) and model.unk_token is None and not self._encode([_RARE])[0]:
            raise DataError(
                f"{file} has no unk_token and no bytes to fall back to: characters that its vocabulary lacks, such as {_RARE!a}, "
                'would vanish from the text. Set "unk_token" or "byte_fallback" there'
            )

    def encode_text(self, texts):
        return [np.asarray(ids, np.int32) for ids in self._encode(texts)]

    def _encode(self, texts, special: bool = False) -> list[list[int]]:
        try:
            return [one.ids for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=special)]
        except Exception as error:  # the library raises bare Exception, for a character without an id say
            raise DataError(f"the tokenizer {self.name} cannot encode a text: {error}") from None

    def decode(self, ids):
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _id_of(self, token) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)


class StoredIds(Tokenizer):
    """No tokenizer: the data are ids already. The last id of the vocabulary ends made-up documents."""

    name, bos_id, pad_id = "none (ids)", None, 0

    def __init__(self, vocab_size: int):
        self.vocab_size, self.eos_id, self.fingerprint = vocab_size, vocab_size - 1, f"ids-{vocab_size}"

    def encode_text(self, texts):
        raise DataError("this data holds token ids and has no tokenizer for text")

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


def load_tokenizer(kind: str, path: str | None = None) -> Tokenizer:
    """kind: bytes, llama3 (path: optional tokenizer.model), hf (path: the folder)."""
    if kind == "bytes":
        if path is not None:
            raise DataError(
                f"data.tokenizer=bytes takes no data.tokenizer_path (got {path}): use data.tokenizer=hf or llama3"
            )
        return ByteTokenizer()
    if kind == "llama3":
        return Llama3Tokenizer(path)
    if kind == "hf":
        return HuggingFaceTokenizer(path)
    raise DataError(f"data.tokenizer={kind!r} is unknown: use {', '.join(KINDS)}")


def _llama3_file(path: str | None) -> Path:
    if path is not None:
        file = Path(path) / "tokenizer.model" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise DataError(f"data.tokenizer_path={path}: there is no file {file}")
        return file
    package = importlib.util.find_spec("llama_models")  # finds the folder without importing it
    for folder in (package.submodule_search_locations if package else None) or ():
        file = Path(folder) / "llama3" / "tokenizer.model"
        if file.is_file():
            return file
    raise DataError(
        "data.tokenizer=llama3 needs the tokenizer.model of Llama-3, which is under Meta's licence and not part of "
        "this package: "
        "pip install --no-deps llama-models==0.3.0, or set data.tokenizer_path"
    )


def _special_tokens(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{file} is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise DataError(f"{file} holds no keys: the file is damaged")
        for key in ("bos_token", "eos_token", "pad_token"):
            value = content.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if value and not isinstance(value, str):
                raise DataError(f"{file}: {key} is {value!r}, expected one token as a text")
            found.update({key: value} if value else {})
    return found


def _digestible(text: str) -> list[str]:
    """Cut where tiktoken would need quadratic time or overflow its stack: 400,000 characters, or a run of 25,000
    (non-)spaces.

    The same cuts as the Llama-3 reference, so ids are the same.
    """
    parts = []
    for start in range(0, len(text), 400_000):
        block = text[start : start + 400_000]
        cut = 0
        for run in re.finditer(r"\s{25001,}|\S{25001,}", block):
            for at in range(run.start() + 25_000, run.end(), 25_000):
                parts.append(block[cut:at])
                cut = at
        parts.append(block[cut:])
    return parts
