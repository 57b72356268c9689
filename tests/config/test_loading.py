"""One strict rule for every source of a value: the field's type decides."""

import dataclasses

import pytest

from te_plugin.config import Config, ConfigError, compose, load, loads, to_yaml
from te_plugin.config.loading import check_value, parse_text, schema_fields

TINY = "recipe=llama_tiny"


def tiny(*overrides: str) -> Config:
    return compose([TINY, *overrides], for_run=False)


def test_every_field_of_the_schema_has_one_plain_type():
    assert {field.kind for field in schema_fields().values()} == {bool, int, float, str}
    assert not schema_fields()["optim.lr"].optional and schema_fields()["data.path"].optional


@pytest.mark.report("hydra-ecosystem/hydra#2599")
@pytest.mark.parametrize("word", ["off", "on", "yes", "no", "Off", "0", "1", "null", "", "falsee"])
def test_on_off_fields_accept_only_true_and_false(word):
    with pytest.raises(ConfigError, match=r"data\.shuffle takes true or false.*only true and false"):
        tiny(f"data.shuffle={word}")


@pytest.mark.parametrize("word,value", [("true", True), ("false", False), ("True", True), ("FALSE", False)])
def test_true_and_false_are_read(word, value):
    assert tiny(f"data.shuffle={word}").data.shuffle is value


@pytest.mark.report("hydra-ecosystem/hydra#2599")
@pytest.mark.parametrize("name", ["1E234", "1e5", "007", "true", "off", "1.0", "inf", "12", "a b", "x=y", "1,2", "[1]", "~x"])
def test_text_stays_the_text_that_was_written(name):
    cfg = tiny(f"track.run_name={name}")
    assert cfg.track.run_name == name
    assert loads(to_yaml(cfg)).track.run_name == name


def test_quotes_make_a_text_of_null():
    assert tiny("track.run_name=null").track.run_name is None
    assert tiny("track.run_name='null'").track.run_name == "null"
    assert loads(to_yaml(tiny("track.run_name='null'"))).track.run_name == "null"


@pytest.mark.parametrize("text,value", [("1e-5", 1e-5), ("3E-4", 3e-4), ("1", 1.0), (".5", 0.5), ("1_000.5", 1000.5)])
def test_numbers_are_floats_of_that_value(text, value):
    assert type(parse_text("optim.lr", text, "test")) is float and parse_text("optim.lr", text, "test") == value


@pytest.mark.report("hydra-ecosystem/hydra#2599")
@pytest.mark.parametrize("text", ["inf", "-inf", "nan", ".inf", "1e999"])
def test_numbers_that_are_not_finite_are_refused(text):
    with pytest.raises(ConfigError, match=r"optim\.lr.*not finite"):
        tiny(f"optim.lr={text}")


@pytest.mark.parametrize("text,hint", [("4e6", "write 4000000"), ("4.0", "write 4"), ("1.5", "not 1.5"), ("two", "not two")])
def test_whole_numbers_are_whole(text, hint):
    with pytest.raises(ConfigError) as caught:
        tiny(f"schedule.tokens={text}")
    assert "schedule.tokens takes a whole number" in str(caught.value) and hint in str(caught.value)


def test_a_number_of_thousands_of_digits_is_refused_in_one_short_line():
    """Python itself refuses to read it, with an error of its own."""
    with pytest.raises(ConfigError) as caught:
        tiny(f"schedule.tokens={'9' * 5000}")
    assert "schedule.tokens takes a whole number" in str(caught.value) and len(str(caught.value)) < 200
    with pytest.raises(ConfigError, match="schedule.tokens takes a whole number"):
        loads(to_yaml(tiny()).replace("tokens: 327680", f"tokens: {'9' * 5000}"))
    assert loads(to_yaml(tiny(f"track.run_name={'9' * 50}"))).track.run_name == "9" * 50


def test_whole_numbers_may_have_underscores():
    assert tiny("schedule.tokens=400_000").schedule.tokens == 400_000


def test_an_empty_text_is_refused():
    with pytest.raises(ConfigError, match=r"data\.tokenizer is empty"):
        tiny("data.tokenizer=")


def test_interpolations_are_refused_so_that_no_environment_variable_can_change_a_run():
    with pytest.raises(ConfigError, match="interpolation"):
        tiny("track.project=${oc.env:HOME}")


def test_bool_is_no_number():
    with pytest.raises(ConfigError, match="whole number"):
        check_value("run.seed", True, "test")


def test_a_resolved_config_is_read_back_equal(tmp_path):
    cfg = tiny("track.run_name=1E234", "optim.lr=1e-5", "data.path=null", "attention.window_left=128")
    (tmp_path / "config.resolved.yaml").write_text(to_yaml(cfg), encoding="utf-8")
    assert load(tmp_path / "config.resolved.yaml") == cfg


@pytest.mark.parametrize("old,new,message", [
    ("shuffle: true", "shuffle: on", "data.shuffle takes true or false, not on"),
    ("shuffle: true", "shuffel: true", "no key 'data.shuffel'; the nearest is 'data.shuffle'"),
    ("num_layers: 4", "num_layers: 4.5", "model.num_layers takes a whole number"),
    ("lr: 0.002", "lr: fast", "optim.lr takes a number"),
    ("rope_scaling:\n    factor: 1.0", "rope_scaling: null\n  xx:\n    factor: 1.0", "model.xx"),
    ("  num_heads: 2\n", "", "model.num_heads is not set"),
    ("  num_heads: 2\n", "  num_heads: 2\n  num_heads: 4\n", "given twice"),
])
def test_a_resolved_config_is_read_as_strictly_as_the_command_line(old, new, message):
    text = to_yaml(tiny())
    assert old in text
    with pytest.raises(ConfigError) as caught:
        loads(text.replace(old, new, 1))
    assert message in str(caught.value)


def test_a_section_cannot_be_null():
    text = to_yaml(tiny())
    start, end = text.index("optim:"), text.index("schedule:")
    with pytest.raises(ConfigError, match="optim is a section and cannot be null"):
        loads(text[:start] + "optim: null\n" + text[end:])


def test_a_missing_file_and_a_broken_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,")
    with pytest.raises(ConfigError, match="broken.yaml: this is no valid YAML"):
        load(tmp_path / "broken.yaml")


def test_the_schema_holds_every_field_that_to_yaml_writes():
    written = [line.split(":")[0].strip() for line in to_yaml(tiny()).splitlines()]
    assert [f.name for f in dataclasses.fields(Config) if f.name not in written] == []
