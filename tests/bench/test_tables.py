"""The README's performance tables are what docs/results says."""

import json

from te_plugin.bench import tables
from te_plugin.support_matrix import __file__ as package_file


def test_the_readme_holds_the_current_tables(tmp_path):
    from pathlib import Path

    readme = Path(package_file).parents[1] / "README.md"
    assert tables.BLOCK.main(["--check", str(readme)]) == 0


def test_every_row_of_ours_is_shown_with_its_ratio(tmp_path, monkeypatch):
    row = {"op": "gemm", "case": "8x8x8", "kernel": "sm90", "ours": True, "rate": 1234.5, "unit": "TFLOP/s", "best_peer": "peer",
           "ratio_to_best_peer": 0.876}
    (tmp_path / "gpu").mkdir()
    head = {"hardware": "GPU", "date": "2026-01-01", "commit": "abc", "versions": {"torch": "2.11.0"}}
    (tmp_path / "gpu" / "gemm.json").write_text(json.dumps({**head, "rows": [row, {**row, "ours": False, "kernel": "peer"}]}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = tables.markdown()
    assert "| gemm | 8x8x8 | sm90 | 1234 TFLOP/s | peer | 0.88 |" in text or "1235 TFLOP/s" in text
    assert text.count("| gemm |") == 1 and "commit abc" in text
