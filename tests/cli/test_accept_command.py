"""te-plugin accept: paired runs from the command line, resumable, refused where it would mean nothing."""

import json

import pytest

from te_plugin import cli
from tests.training.small import SMALL as SMALL_RUN

SMALL = [o for o in SMALL_RUN if not o.startswith(("check.", "schedule.tokens"))] + ["schedule.tokens=2560", "accept.seeds=2"]


def accept(*argv: str) -> int:
    return cli.main(["accept", *argv])


def test_an_acceptance_runs_every_arm_once_and_continues(tmp_path, capsys):
    out = tmp_path / "out"
    code = accept(*SMALL, "--out", str(out))
    printed = capsys.readouterr().out
    verdict = json.loads((out / "verdict.json").read_text())
    assert code == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2, "SUSPECT": 2}[verdict["status"]]
    for gate in ("G1 health", "G2 endpoint", "G3 shape", "G4 assay"):
        assert gate in printed
    assert (out / "accept.png").stat().st_size > 1000
    arms = sorted(str(p.parent.relative_to(out)) for p in out.glob("*/*/metrics.jsonl"))
    assert arms == [f"seed{seed}/{name}" for seed in (0, 1) for name in ("bf16", "candidate", "twin")]
    stamps = {p: p.stat().st_mtime_ns for p in out.glob("*/*/metrics.jsonl")}
    assert accept(*SMALL, "--out", str(out)) == code
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps, "finished arms are not run again"
    capsys.readouterr()
    assert accept(*SMALL, "optim.lr=1e-4", "--out", str(out)) == 1
    assert "another optim.lr" in capsys.readouterr().err


@pytest.mark.parametrize("argv,said", [
    (("recipe=llama_tiny", "precision=bf16"), "that; set precision"),
    (("recipe=llama_tiny", "run.dir=x"), "--out"),
    (("recipe=llama_tiny", "check.mode=off"), "leave it out"),
    (("recipe=llama_tiny", "accept.seeds=1"), "at least 2"),
])  # fmt: skip
def test_what_acceptance_cannot_mean_is_refused_before_a_folder_is_made(tmp_path, monkeypatch, capsys, argv, said):
    monkeypatch.chdir(tmp_path)
    assert accept(*argv) == 1
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())
