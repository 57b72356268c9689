"""Small files and configs for the data tests."""

import json

import numpy as np
import pytest

from te_plugin.config import Config

WORDS = (
    "to be or not that is the question whether tis nobler in mind suffer slings arrows of outrageous fortune".split()
)


@pytest.fixture
def texts(rng):
    """40 documents of 1 to 120 words."""
    return [" ".join(rng.choice(WORDS, int(rng.integers(1, 120)))) + "\n" for _ in range(40)]


@pytest.fixture
def text_folder(tmp_path, texts):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for number, text in enumerate(texts):
        place = folder / "deep" if number % 2 else folder
        (place / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def config():
    """A function that makes a Config with only the fields that data reads."""

    def make(source="corpus", path=None, *, vocab_size=384, seq_len=256, **data):
        cfg = Config()
        cfg.model.vocab_size = vocab_size
        cfg.data.source, cfg.data.path, cfg.data.seq_len = source, None if path is None else str(path), seq_len
        cfg.layout.max_segments = data.pop("max_segments", 64)
        cfg.parallel.context_parallel = data.pop("context_parallel", 1)
        for key, value in data.items():
            setattr(cfg.data, key, value)
        return cfg

    return make


@pytest.fixture
def hf_folder(tmp_path):
    """A function that writes a small byte-level BPE tokenizer folder."""
    tokenizers = pytest.importorskip("tokenizers")

    def write(bos=True, eos="</s>"):
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>", "<pad>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator([" ".join(WORDS)] * 4, trainer)
        if bos:
            model.post_processor = tokenizers.processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 0)]
            )
        folder = tmp_path / f"tokenizer-{bos}-{bool(eos)}"
        folder.mkdir()
        model.save(str(folder / "tokenizer.json"))
        special = {"bos_token": "<s>", "pad_token": {"content": "<pad>"}} | ({"eos_token": eos} if eos else {})
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        return folder

    return write


def documents_of(batch):
    """[(document, tokens, labels, positions)] of the segments of a Batch."""
    found = []
    for n in range(batch.segments):
        start, length = batch.cu_seqlens_padded[n], batch.cu_seqlens[n + 1] - batch.cu_seqlens[n]
        place = slice(int(start), int(start + length))
        found.append(
            (
                int(batch.doc_ids[n]),
                batch.tokens[place].tolist(),
                batch.labels[place].tolist(),
                batch.positions[place].tolist(),
            )
        )
    return found


@pytest.fixture
def segments_of():
    return documents_of


@pytest.fixture
def random_documents(rng):
    """A function that makes documents of random ids."""

    def make(count=50, longest=200, vocab=384):
        return [rng.integers(0, vocab, int(rng.integers(1, longest))).astype(np.int32) for _ in range(count)]

    return make
