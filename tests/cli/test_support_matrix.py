"""The matrix is what supports() says, and the README holds the current one."""

from pathlib import Path

import pytest

from te_plugin import Target, support_matrix
from te_plugin.plan import ARCHITECTURES, FRAMEWORKS, ops, registered

README = Path(support_matrix.__file__).parents[1] / "README.md"


def test_every_op_and_every_kernel_that_can_do_something_is_in_the_matrix():
    text = support_matrix.markdown()
    asked = {problem.op for _, problem in support_matrix.cases()}
    assert asked == set(ops())
    for op in asked:
        for kernel in registered(op):
            problems = [problem for _, problem in support_matrix.cases() if problem.op == op]
            if any(kernel.supports(p, Target(a, f)) for p in problems for a in ARCHITECTURES for f in FRAMEWORKS):
                assert any(kernel.name in line for line in text.splitlines() if line.startswith(f"| {op} |"))


def test_a_cell_is_the_answer_of_supports():
    for says, problem in support_matrix.cases():
        for arch in ARCHITECTURES:
            cell = support_matrix.cell(problem, arch)
            for kernel in registered(problem.op):
                able = any(kernel.supports(problem, Target(arch, framework)) for framework in FRAMEWORKS)
                named = kernel.name in [word.partition("*")[0].partition(" ")[0] for word in cell.split(", ")]
                assert able == named, (says, arch, kernel.name, cell)


def test_write_and_check(tmp_path, capsys):
    file = tmp_path / "README.md"
    file.write_text(f"before\n{support_matrix.BEGIN}\nold\n{support_matrix.END}\nafter\n")
    assert support_matrix.main(["--check", str(file)]) == 1 and "stale" in capsys.readouterr().err
    assert support_matrix.main(["--write", str(file)]) == 0
    assert support_matrix.main(["--check", str(file)]) == 0
    assert file.read_text() == f"before\n{support_matrix.block()}\nafter\n"


def test_a_file_without_the_markers_is_refused(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("no markers")
    with pytest.raises(ValueError, match="marker lines"):
        support_matrix.main(["--write", str(file)])


def test_the_readme_holds_the_current_matrix():
    text = README.read_text(encoding="utf-8")
    assert support_matrix.BLOCK.renewed(text, "README.md") == text, "run: python -m te_plugin.support_matrix --write README.md"
