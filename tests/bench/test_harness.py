"""The bench harness: candidates take turns, a result file holds what the README's tables are made from."""

import io
import json

import pytest
import torch
from rich.console import Console

from te_plugin.bench import Options
from te_plugin.bench.attention import Case, Inputs, measure
from te_plugin.bench.harness import Report, Row, interleaved, rank
from te_plugin.config import ConfigError


def row(kernel: str, ours: bool, ms: float, case: str = "a") -> Row:
    return Row("op", case, kernel, ours, ms, ms * 0.9, ms * 1.1, rate=1.0, unit="TFLOP/s", rel_error=1e-3)


def test_candidates_take_turns():
    order = []

    def candidate(name):
        def call():
            order.append(name)
            torch.randn(200_000).sin().sum()  # longer than the millisecond below which a turn repeats its call

        return call

    timings = interleaved({name: candidate(name) for name in "abc"}, seconds=0.0, least=3, most=3)
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns[-9:] == list("abcabcabc")
    assert all(0 < t.low <= t.median <= t.high and t.turns == 3 for t in timings.values())


def test_best_peer_is_the_fastest_of_somebody_else_on_the_same_case():
    rows = [row("ours", True, 2.0), row("slow", False, 8.0), row("fast", False, 5.0), row("other case", False, 1.0, case="b")]
    rank(rows)
    assert rows[0].best_peer == "fast" and rows[0].ratio_to_best_peer == pytest.approx(2.5)
    assert rows[2].best_peer == "slow"
    assert rows[3].best_peer is None


def test_result_files_are_written_and_read_back(tmp_path):
    report = Report("attention", torch.device("cpu"), rows=[row("ours", True, 2.0), row("peer", False, 5.0)])
    data, picture = report.write(tmp_path)
    assert picture.stat().st_size > 1000
    result = json.loads(data.read_text(encoding="utf-8"))
    assert {"hardware", "date", "commit", "versions", "rows"} <= set(result)
    fields = {"op", "case", "kernel", "ours", "ms", "rate", "unit", "rel_error", "best_peer", "ratio_to_best_peer", "cpu_us"}
    assert fields <= set(result["rows"][0])
    assert result["rows"][0]["ratio_to_best_peer"] == 2.5


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_no_measurement_keeps_is_refused(seconds):
    with pytest.raises(ConfigError, match=f"--seconds {seconds:g}: above 0, and finite"):
        Options(seconds=seconds)


def test_unknown_cases_are_named():
    with pytest.raises(ConfigError, match="no case is named 'b'; known: a"):
        Options(cases=("b",)).select(["a"], ["fp32"])
    with pytest.raises(ConfigError, match="no dtype is named 'fp8'; known: fp32"):
        Options(dtype="fp8").select(["a"], ["fp32"])


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)])
def test_every_attention_candidate_is_compared_with_float64(dtype, bound):
    rows = measure(Inputs(Case("tiny", (33, 7, 1), heads=4, kv_heads=2, dim=32, dtype=dtype)), seconds=0.0)
    assert {r.op for r in rows} == {"attention forward", "attention forward+backward"} and len(rows) == 6
    assert all(r.rel_error < bound for r in rows), [(r.kernel, r.rel_error) for r in rows]


def test_the_fraction_of_the_copy_bandwidth_is_a_column_where_it_was_measured():
    def printed(of_copy):
        report = Report("quantize", torch.device("cpu"), rows=[row("ours", True, 2.0), row("copy", False, 1.0)])
        report.rows[0].of_copy = of_copy
        console = Console(width=200, record=True, file=io.StringIO())
        report.print(console)
        return console.export_text()

    assert "of copy" in printed(0.47) and "0.47" in printed(0.47)
    assert "of copy" not in printed(None)
