"""The examples of docs/data.md give what the page says."""

import doctest
from pathlib import Path

import pytest

from te_plugin.data import build_data, byte_entropy

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_examples_run():
    text = PAGE.read_text(encoding="utf-8").replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, "docs/data.md", str(PAGE), 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_numbers_of_the_corpus_are_its_own(config):
    text, report = PAGE.read_text(encoding="utf-8"), build_data(config(seq_len=1024)).report()
    assert f"{report['documents']:,} documents" in text
    assert f"**{byte_entropy():.4f} nats**" in text
    assert f"{100 * report['fill']:.1f} % full on the corpus at 1,024" in text.replace("\n", " ")
    assert f"{100 * report['fill_one_document_a_row']:.0f} %" in text
    assert report["fill"] == pytest.approx(0.997, abs=1e-3)
