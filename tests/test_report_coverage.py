"""docs/bug-reports.md and the markers in the tests tell the same story: every cited report has a row, every row its tests."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "bug-reports.md"
REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def markers(path: Path) -> set[str]:
    """Reports cited by @pytest.mark.report(...) in a file."""
    cited = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.report":
            cited |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return cited


CITED = {str(path.relative_to(ROOT)): found for path in sorted((ROOT / "tests").rglob("*.py")) if (found := markers(path))}


def rows() -> list[tuple[list[str], list[str]]]:
    """(reports, test files or []) of every table row."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and REPORT.match(cells[0]):
            found.append((REPORT.findall(cells[0]), re.findall(r"tests/\S+\.py", cells[-1])))
    return found


def test_every_cited_report_is_on_the_page():
    listed = {report for reports, _ in rows() for report in reports}
    missing = {report for found in CITED.values() for report in found} - listed
    assert not missing, f"cited by tests, missing in {PAGE.name}: {sorted(missing)}"


@pytest.mark.parametrize("reports,files", [pytest.param(*row, id=row[0][0]) for row in rows() if row[1]])
def test_the_named_files_hold_a_test_with_the_report(reports, files):
    for name in files:
        assert set(reports) & CITED.get(name, set()), f"{name} has no test marked with one of {reports}"
    marked = set().union(*(CITED.get(name, set()) for name in files))
    assert set(reports) <= marked, f"no test is marked with {sorted(set(reports) - marked)}"


def test_what_cannot_run_here_says_why_and_is_tested_as_far_as_it_can_be():
    tested = {report for reports, files in rows() if files for report in reports}
    for reports, files in rows():
        assert files or set(reports) <= tested, f"{reports} has neither a test nor a row that names one"


def test_every_marker_names_a_report():
    wrong = [(name, report) for name, found in CITED.items() for report in found if not REPORT.fullmatch(str(report))]
    assert not wrong
