"""bench calls: the raw kernels that a call is compared with are those that the call runs, so both give the same bits."""

import pytest

from te_plugin.bench import Options, calls


@pytest.mark.parametrize(("case", "rows"), [("attention", 4), ("linear", 2 * len(calls.PRECISIONS))])
def test_a_call_equals_its_raw_kernels(case, rows):
    report = calls.run(Options(cases=(case,), seconds=0.01))
    assert len(report.rows) == rows
    assert {row.op for row in report.rows} == {f"{case} call"}
    assert all(row.rel_error == 0 for row in report.rows), report.rows
    assert all(row.cpu_us is not None and row.start_us > 0 for row in report.rows)
