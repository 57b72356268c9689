"""Where documents come from, and what is said when they are missing or broken."""

import gzip
import json
import math

import pytest

from te_plugin.data import DataError, byte_entropy, open_source


def _names_and_texts(source):
    return list(source)


def test_the_corpus_holds_documents_of_varied_length():
    documents = list(open_source("corpus"))
    lengths = sorted(len(text.encode()) for _, text in documents)
    assert len(documents) == len({name for name, _ in documents}) == 7823
    assert sum(lengths) == 5_044_408
    assert lengths[0] < 100 and 300 < lengths[len(lengths) // 2] < 800 and lengths[-1] > 10_000
    assert open_source("corpus").size < 2_000_000
    names = " ".join(name for name, _ in documents)
    assert "hamlet/scene-01" in names and "sonnets/poem-018" in names and "rape-of-lucrece/stanza-001" in names
    text = dict(documents)["sonnets/poem-018"]
    assert "Shall I compare thee to a summer's day?" in text and "Gutenberg" not in text


def test_the_byte_entropy_of_the_corpus_is_the_one_the_readme_quotes():
    assert byte_entropy() == pytest.approx(3.3306, abs=5e-5)


def test_byte_entropy_of_known_frequencies():
    assert byte_entropy(["ab" * 50]) == pytest.approx(math.log(2))
    assert byte_entropy([bytes(range(256))]) == pytest.approx(math.log(256))
    assert byte_entropy(["aaa", "a"]) == 0
    with pytest.raises(DataError, match="no text"):
        byte_entropy([])


def test_text_files_come_in_the_order_of_their_paths(text_folder, texts):
    (text_folder / ".hidden.txt").write_text("hidden")
    (text_folder / "notes.pdf").write_text("other kind")
    found = _names_and_texts(open_source("text", str(text_folder)))
    assert [name for name, _ in found] == sorted(name for name, _ in found)
    assert sorted(text for _, text in found) == sorted(texts)
    assert all(name.endswith(".txt") and str(text_folder) in name for name, _ in found)


def test_one_file_is_a_source_too_and_a_byte_order_mark_is_no_text(tmp_path):
    file = tmp_path / "one.anything"
    file.write_bytes(b"\xef\xbb\xbfhello")
    assert _names_and_texts(open_source("text", str(file))) == [(str(file), "hello")]


def test_json_lines_keep_their_order_and_field(tmp_path, texts):
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    lines = [json.dumps({"body": text, "n": n}) for n, text in enumerate(texts)]
    plain.write_text("\n".join(lines[:25]) + "\n", encoding="utf-8")
    with gzip.open(packed, "wt", encoding="utf-8") as stream:
        stream.write("\n".join(lines[25:]))
    found = _names_and_texts(open_source("jsonl", str(tmp_path), "body"))
    assert [text for _, text in found] == texts
    assert found[2][0] == f"{plain}, record 3"


def test_parquet_rows_keep_their_order(tmp_path, texts):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": texts, "n": list(range(40))}), tmp_path / "a.parquet", row_group_size=7)
    assert [text for _, text in open_source("parquet", str(tmp_path))] == texts


def test_the_content_hash_follows_the_text_and_not_the_names(text_folder):
    first = open_source("text", str(text_folder)).content_hash()
    text_folder.rename(text_folder.with_name("moved"))
    moved = text_folder.with_name("moved")
    assert open_source("text", str(moved)).content_hash() == first
    file = next(moved.glob("*.txt"))
    file.write_text(file.read_text() + "!")
    assert open_source("text", str(moved)).content_hash() != first


@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        ("text", None, "data.source=text needs data.path"),
        ("text", "missing", "missing does not exist"),
        ("text", "", "holds no file that ends in .txt"),
        ("jsonl", "", "holds no file that ends in .jsonl"),
        ("corpus", "", "takes no data.path"),
        ("csv", "", "'csv' is no text source"),
    ],
)
def test_paths_that_give_nothing_are_refused_at_once(tmp_path, kind, path, message):
    with pytest.raises(DataError, match=message):
        open_source(kind, None if path is None else str(tmp_path / path))


@pytest.mark.parametrize("content", ["", "  \n\n\t"])
def test_an_empty_document_is_named(tmp_path, content):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text(content)
    with pytest.raises(DataError, match=r"document .*b\.txt is empty"):
        _names_and_texts(open_source("text", str(tmp_path)))


@pytest.mark.parametrize("prefix", [b"plain ", "naïve ".encode() * 300_000])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xe2\x82"])
def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path, prefix, bad):
    (tmp_path / "a.txt").write_bytes(prefix + bad)
    with pytest.raises(DataError, match=rf"a\.txt is not UTF-8: byte {len(prefix)} \(0x{bad[0]:02x}\)"):
        _names_and_texts(open_source("text", str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "b\xff"}\n', r"not UTF-8: byte 25 \(0xff\)"),
        (b'{"text": "a"}\n{"text": \n', "line 2 is no JSON"),
        (b'{"text": "a"}\n[1, 2]\n', "line 2 is no JSON object"),
        (b'{"body": "a"}\n', r"record 1 has no field 'text' \(it has: body\): set data.text_field"),
        (b'{"text": "a"}\n{"text": null}\n', r"record 2: field 'text' is empty \(null\)"),
        (b'{"text": 3}\n', "field 'text' is of type int"),
        (b'{"text": "a"}\n{"text": ""}\n', "record 2 is empty"),
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"text": "a"}\n' + b"[" * 100_000, "line 2 is no JSON: maximum recursion depth"),
    ],
)
def test_broken_json_lines_are_named_with_the_place(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        _names_and_texts(open_source("jsonl", str(tmp_path)))
    assert "a.jsonl" in str(caught.value)


def test_broken_parquet_and_gzip_are_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"this is no parquet file")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be read as parquet"):
        _names_and_texts(open_source("parquet", str(broken)))
    pq.write_table(pa.table({"text": [b"a", b"b"]}), tmp_path / "bytes.parquet")
    with pytest.raises(DataError, match="is of type bytes, expected a string"):
        _names_and_texts(open_source("parquet", str(tmp_path / "bytes.parquet")))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}' * 50)[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is no sound gzip file"):
        _names_and_texts(open_source("jsonl", str(tmp_path)))


@pytest.mark.report("huggingface/datasets#7222", "huggingface/datasets#5596")
@pytest.mark.parametrize("records", [
    [{"text": "2020-01-01", "n": 1}, {"text": "2021-02-03T10:00:00Z", "n": 2}],
    [{"text": "a", "meta": 1}] * 3 + [{"text": "b", "meta": "x"}, {"text": "c", "meta": {"deep": []}}],
    [{"text": "a", "meta": [0, "Biology"]}, {"text": "b"}, {"other": None, "text": "c"}],
], ids=["dates", "types change", "fields come and go"])  # fmt: skip
def test_no_type_is_guessed_from_what_fields_look_like(tmp_path, records):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert [text for _, text in open_source("jsonl", str(tmp_path))] == [record["text"] for record in records]


@pytest.mark.parametrize("content", [
    '[{"text": "a"}, {"text": "b"}]', '[\n {"text": "a"},\n {"text": "b"}\n]\n',
    '\ufeff{"text": "a"}\r\n\r\n{"text": "b"}\r\n',
], ids=["list", "pretty list", "windows"])  # fmt: skip
def test_a_list_in_a_file_is_read_as_well(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content.encode())
    assert [text for _, text in open_source("jsonl", str(tmp_path))] == ["a", "b"]


def test_half_a_character_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b \\ud800 c"}\n')
    with pytest.raises(DataError, match=r"a.jsonl, record 2: field 'text' holds half a character \(surrogate '.ud800'\)"):
        _names_and_texts(open_source("jsonl", str(tmp_path)))


@pytest.mark.report("huggingface/datasets#7468")
@pytest.mark.parametrize("folder", ["a[1]", "a*", "a?b", "a::b", "a b", "{a}"])
def test_a_path_is_no_pattern(tmp_path, folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in (folder, "a1", "axb"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"text": [f"in {name}"]}), tmp_path / name / "a.parquet")
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"text": f"in {name}"}))
    for kind in ("parquet", "jsonl"):
        assert [text for _, text in open_source(kind, str(tmp_path / folder))] == [f"in {folder}"]


def test_other_columns_of_parquet_do_not_matter(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    counts = pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64()))
    features = {b"huggingface": b'{"info": {"features": {"text": {"_type": "Unknown"}}}}'}
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        table = pa.table({"counts": counts, "text.length": [1, 1], "text": pa.array(["a", "b"]).cast(kind)})
        pq.write_table(table.replace_schema_metadata(features), tmp_path / "a.parquet")
        assert [text for _, text in open_source("parquet", str(tmp_path))] == ["a", "b"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a", None]}, r"a\.parquet, row 2: field 'text' is empty \(null\)"),
        ({"body": ["a"]}, r"a\.parquet has no field 'text' \(it has: body\)"),
        ({"text": []}, r"a\.parquet is empty"),
    ],
)
def test_what_is_wrong_in_parquet_is_named_with_the_row(tmp_path, columns, message):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        _names_and_texts(open_source("parquet", str(tmp_path)))


@pytest.mark.report("cytomining/CytoTable#440", "allenai/ir_datasets#160")
def test_folders_behind_links_are_searched_and_read_once(tmp_path):
    far, root = tmp_path / "far", tmp_path / "root"
    (far / "deep").mkdir(parents=True)
    root.mkdir()
    (root / "a.txt").write_text("near")
    (far / "deep" / "b.txt").write_text("far")
    (root / "disk1").symlink_to(far)
    (root / "same").symlink_to(far / "deep")
    (root / "loop").symlink_to(root)
    (far / "back").symlink_to(root)
    assert [(name[len(str(root)) :], text) for name, text in open_source("text", str(root))] == [
        ("/a.txt", "near"), ("/disk1/deep/b.txt", "far")]  # fmt: skip


def test_files_that_would_be_left_out_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.jsonl is no file that can be read"):
        open_source("jsonl", str(tmp_path))
    (tmp_path / "gone.jsonl").unlink()
    for name in ("b.jsonl.zst", "B.JSON.XZ"):
        (tmp_path / name).write_bytes(b"packed")
        with pytest.raises(DataError, match=rf"{name} is packed in a form that is not read here"):
            open_source("jsonl", str(tmp_path))
        (tmp_path / name).unlink()
    (tmp_path / "a.jsonl.zst").write_bytes(b"what a.jsonl was unpacked from")
    (tmp_path / "c.txt.gz").write_bytes(b"of another kind")
    assert len(_names_and_texts(open_source("jsonl", str(tmp_path)))) == 1


def test_the_case_of_an_ending_does_not_matter(tmp_path):
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "a"}'))
    assert [text for _, text in open_source("jsonl", str(tmp_path))] == ["a"]
