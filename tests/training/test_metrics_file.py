"""metrics.jsonl never loses, repeats or reorders a row."""

import json
import math

import pytest

from te_plugin.training.metrics import MetricsError, MetricsFile, read_metrics


def row(step, loss=None):
    return {"step": step, "train/loss": 1.0 / step if loss is None else loss}


def test_rows_read_back_equal_including_non_finite_numbers(tmp_path):
    file = MetricsFile(tmp_path)
    values = [0.1, math.inf, -math.inf, math.nan, 1.1234567890123457]
    for step, value in enumerate(values, start=1):
        file.append(row(step, value))
    for line in file.path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = [r["train/loss"] for r in read_metrics(tmp_path)]
    assert back[:3] == values[:3] and math.isnan(back[3]) and back[4] == values[4]


def test_a_step_that_goes_backwards_is_refused_and_the_file_is_unchanged(tmp_path):
    file = MetricsFile(tmp_path)
    file.append(row(1))
    file.append(row(2))
    before = file.path.read_bytes()
    for step in (2, 1):
        with pytest.raises(MetricsError, match="resume"):
            file.append(row(step))
    assert file.path.read_bytes() == before


@pytest.mark.parametrize("bad", [{"train/loss": 1.0}, {"step": 1.5}, {"step": True}, {"step": 1, "x": [1]}])
def test_a_row_without_a_step_or_with_a_list_is_refused(tmp_path, bad):
    with pytest.raises(MetricsError):
        MetricsFile(tmp_path).append(bad)


def test_rewind_drops_later_rows_and_a_half_written_line(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(1, 8):
        file.append(row(step))
    file.close()
    with open(file.path, "a") as raw:
        raw.write('{"step": 8, "train/lo')
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 8))
    file = MetricsFile(tmp_path)
    assert file.last_step == 7
    assert [r["step"] for r in file.rewind(5)] == [1, 2, 3, 4]
    file.append(row(5))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_appending_after_a_half_written_line_starts_a_clean_line(tmp_path):
    file = MetricsFile(tmp_path)
    file.append(row(1))
    file.close()
    with open(file.path, "a") as raw:
        raw.write('{"step": 2, "tra')
    file = MetricsFile(tmp_path)
    file.append(row(2))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("line", [b"5", b"[]", b'{"train/loss": 1.0}', b'{"step": "3"}', b"\xff\xfe", b"\0" * 40, b"null"])
def test_a_line_that_is_no_row_is_named_and_only_at_the_end_forgiven(tmp_path, line):
    """A crash of the machine leaves zero bytes; an editor leaves anything."""
    file = MetricsFile(tmp_path)
    file.append(row(1))
    file.close()
    file.path.write_bytes(file.path.read_bytes() + line)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]
    file.path.write_bytes(file.path.read_bytes() + b"\n")
    with pytest.raises(MetricsError, match=":2: not a JSON row"):
        read_metrics(tmp_path)


def test_steps_that_do_not_go_up_and_numbers_that_are_missing_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": "NaN"}\n{"step": 2, "train/loss": 1}\n')
    assert len(read_metrics(path, ["train/loss"])) == 2
    with pytest.raises(MetricsError, match=":1: .*it has no number 'val/loss'"):
        read_metrics(path, ["train/loss", "val/loss"])
    path.write_text(path.read_text() * 2)
    with pytest.raises(MetricsError, match=":3: .*step 1 after step 2"):
        read_metrics(path)


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path):
    file = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        file.append(row(step))
    lines = file.path.read_text().splitlines()
    lines[1] = lines[1][:10]
    file.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(MetricsError, match=":2:"):
        read_metrics(tmp_path)
