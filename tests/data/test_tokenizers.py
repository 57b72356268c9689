"""Tokenizers: BOS/EOS policy, special tokens in texts, vocabularies, and what is said when files are missing."""

import base64
import importlib.util
import json

import numpy as np
import pytest

from te_plugin.data import DataError, load_tokenizer
from te_plugin.data.tokenizers import _digestible

TEXTS = ["To be, or not to be", "naïve café €5 \U0001f600\n", "a"]


def test_bytes_wrap_every_document_in_bos_and_eos():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (384, 256, 257, 258)
    for text, ids in zip(TEXTS, tokenizer.encode_documents(TEXTS), strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == [256, *text.encode(), 257]
        assert tokenizer.decode(ids) == text


def test_options_that_would_be_ignored_are_refused():
    with pytest.raises(DataError, match="bytes takes no data.tokenizer_path"):
        load_tokenizer("bytes", "somewhere")
    with pytest.raises(DataError, match="'gpt2' is unknown"):
        load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def llama3_file(tmp_path_factory):
    """A file in the layout of Llama-3's: 128,000 ranks, the 256 bytes first, then made-up merges."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b" t", b"he", b" the"]
    alphabet = [bytes([byte]) for byte in range(97, 123)]
    made = (a + b + c + d for a in alphabet for b in alphabet for c in alphabet for d in alphabet)
    tokens += [token for token, _ in zip(made, range(128_000 - len(tokens)), strict=False)]
    file = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    file.write_bytes(b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)) + b"\n")
    return file


def test_llama3_documents_carry_its_bos_and_eos(llama3_file):
    pytest.importorskip("tiktoken")
    for path in (llama3_file, llama3_file.parent):
        tokenizer = load_tokenizer("llama3", str(path))
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (128_256, 128_000, 128_001)
        for text, ids in zip(TEXTS, tokenizer.encode_documents(TEXTS), strict=True):
            assert ids[0] == 128_000 and ids[-1] == 128_001 and (ids[1:-1] < 128_000).all()
            assert tokenizer.decode(ids) == text


def test_a_special_token_spelt_out_in_a_text_cannot_end_the_document(llama3_file, hf_folder):
    pytest.importorskip("tiktoken")
    for tokenizer, spelt in (
        (load_tokenizer("llama3", str(llama3_file)), "<|end_of_text|>"),
        (load_tokenizer("hf", str(hf_folder())), "</s>"),
    ):
        ids = tokenizer.encode_documents([f"a {spelt} b"])[0]
        assert (ids == tokenizer.eos_id).sum() == 1 and ids[-1] == tokenizer.eos_id
        assert spelt in tokenizer.decode(ids)


def test_the_wrong_vocabulary_file_is_refused(tmp_path):
    pytest.importorskip("tiktoken")
    file = tmp_path / "tokenizer.model"
    file.write_bytes(base64.b64encode(b"a") + b" 0\n")
    with pytest.raises(DataError, match="holds 1 tokens, Llama-3 has 128000"):
        load_tokenizer("llama3", str(file))
    file.write_bytes(b"this is no vocabulary\n")
    with pytest.raises(DataError, match="is no tiktoken vocabulary"):
        load_tokenizer("llama3", str(file))
    with pytest.raises(DataError, match="there is no file"):
        load_tokenizer("llama3", str(tmp_path / "missing"))


def test_llama3_is_found_in_the_installed_package_or_the_error_says_how_to_get_it():
    pytest.importorskip("tiktoken")
    if importlib.util.find_spec("llama_models") is None:
        with pytest.raises(DataError, match="pip install --no-deps llama-models"):
            load_tokenizer("llama3")
        return
    tokenizer = load_tokenizer("llama3")
    assert tokenizer.fingerprint == "llama3-82e9d31979e92ab9"
    ids = tokenizer.encode_documents(["This is a test sentence."])[0]
    assert ids.tolist() == [128000, 2028, 374, 264, 1296, 11914, 13, 128001]


def test_very_long_runs_are_cut_as_llama3_cuts_them():
    text = "x" * 60_000 + " " * 30_000 + "word " * 90_000
    parts = _digestible(text)
    assert "".join(parts) == text
    assert [len(part) for part in parts[:3]] == [25_000, 25_000, 35_000]  # 10,000 letters are left, then 25,000 spaces
    assert max(map(len, parts)) <= 400_000


def test_a_hugging_face_folder_follows_its_own_bos_habit(hf_folder):
    with_bos, without = load_tokenizer("hf", str(hf_folder(bos=True))), load_tokenizer("hf", str(hf_folder(bos=False)))
    assert with_bos.bos_id == 0 and without.bos_id is None
    assert with_bos.eos_id == 1 and with_bos.pad_id == 2
    for tokenizer in (with_bos, without):
        for text, ids in zip(TEXTS, tokenizer.encode_documents(TEXTS), strict=True):
            assert ids[-1] == 1 and (ids[0] == 0) == (tokenizer.bos_id is not None)
            assert ids.max() < tokenizer.vocab_size
            assert tokenizer.decode(ids) == text
    assert with_bos.fingerprint != without.fingerprint


def test_a_hugging_face_folder_saved_by_transformers_gives_the_same_ids(hf_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    source = hf_folder(bos=True)
    saved = tmp_path / "saved"
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    reference.save_pretrained(saved)
    ours = load_tokenizer("hf", str(saved))
    for text in TEXTS:
        assert ours.encode_documents([text])[0].tolist() == [*reference(text)["input_ids"], reference.eos_token_id]


def test_hugging_face_folders_that_cannot_work_are_refused(hf_folder, tmp_path):
    with pytest.raises(DataError, match="needs data.tokenizer_path"):
        load_tokenizer("hf")
    with pytest.raises(DataError, match="holds no tokenizer.json"):
        load_tokenizer("hf", str(tmp_path))
    with pytest.raises(DataError, match="names no eos_token"):
        load_tokenizer("hf", str(hf_folder(eos=None)))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(DataError, match="cannot be read as a tokenizer"):
        load_tokenizer("hf", str(broken))


@pytest.mark.report("huggingface/tokenizers#644")
def test_a_tokenizer_that_draws_its_ids_is_refused(hf_folder):
    """With BPE dropout every process, and every start of a run, would read other tokens."""
    file = hf_folder() / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["dropout"] = 0.1
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="has dropout=0.1.*a text would get other ids at every reading"):
        load_tokenizer("hf", str(file.parent))
    content["model"]["dropout"] = 0.0
    file.write_text(json.dumps(content))
    assert load_tokenizer("hf", str(file.parent)).eos_id == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "tokenizer_config.json holds no keys"),
        ({"eos_token": ["</s>"]}, r"eos_token is \['</s>'\], expected one token"),
        ({"eos_token": {"content": 5}}, "eos_token is 5"),
        ({"eos_token": {"lstrip": True}}, "names no eos_token"),
    ],
)
def test_special_tokens_of_another_kind_are_named(hf_folder, config, message):
    folder = hf_folder()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=message):
        load_tokenizer("hf", str(folder))


def _characters(folder, model):
    """A folder with a tokenizer of whole characters: "a", "b" and </s>."""
    from tokenizers.pre_tokenizers import Split

    model.pre_tokenizer = Split("", "isolated")
    model.add_special_tokens(["</s>"])
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return str(folder)


@pytest.mark.report("huggingface/tokenizers#517")
def test_a_tokenizer_that_drops_what_it_does_not_know_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.models.BPE
    with pytest.raises(DataError, match=r"'\\U00012000', would vanish from the text"):
        load_tokenizer("hf", _characters(tmp_path / "drops", tokenizers.Tokenizer(bpe({"a": 0, "b": 1}, []))))
    keeps = bpe({"a": 0, "b": 1, "?": 2}, [], unk_token="?")
    tokenizer = load_tokenizer("hf", _characters(tmp_path / "keeps", tokenizers.Tokenizer(keeps)))
    assert tokenizer.encode_documents(["aéb"])[0].tolist() == [0, 2, 1, 3]


def test_a_character_that_a_tokenizer_refuses_is_one_message(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="?")
    tokenizer = load_tokenizer("hf", _characters(tmp_path / "words", tokenizers.Tokenizer(words)))
    assert tokenizer.encode_documents(["ab"])[0].tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="hf:words cannot encode a text: WordLevel error: Missing .UNK. token"):
        tokenizer.encode_documents(["aéb"])
