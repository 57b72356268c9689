"""The performance tables of the README, made from docs/results and nothing else.

    python -m te_plugin.bench.tables                    print them
    python -m te_plugin.bench.tables --write README.md  renew the block between the markers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from te_plugin.generated import GeneratedBlock

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def markdown() -> str:
    """One table a machine and benchmark: our kernels, their rate, and their ratio to the best peer of the same run."""
    parts = []
    for path in sorted(RESULTS.glob("*/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in found.get("rows", []) if row["ours"]]
        if not rows:
            continue
        versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "triton") if name in found["versions"])
        parts += [f"**{path.stem}** on {found['hardware']}, {found['date']}, commit {found['commit'][:12]}, {versions}", "",
                  *_table(rows)]
        parts.append("")
    return "\n".join(parts).rstrip()


# Columns that a table has only where one of its rows has the value, and how they are written.
_OPTIONAL = {"of_copy": ("of copy bandwidth", ".2f"), "cpu_us": ("host us a call", ".1f"),
             "start_us": ("until its first kernel", ".1f")}


def _table(rows: list[dict]) -> list[str]:
    extra = [key for key in _OPTIONAL if any(row.get(key) is not None for row in rows)]
    heads = ["op", "case", "kernel", "rate", "best peer in the run", "ours / peer", *(_OPTIONAL[key][0] for key in extra)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        ratio = "" if row.get("ratio_to_best_peer") is None else f"{row['ratio_to_best_peer']:.2f}"
        values = ("" if row.get(key) is None else format(row[key], _OPTIONAL[key][1]) for key in extra)
        line = [row["op"], row["case"], row["kernel"], f"{row['rate']:.4g} {row['unit']}", row.get("best_peer") or "-", ratio]
        lines.append(f"| {' | '.join([*line, *values])} |")
    return lines


BLOCK = GeneratedBlock("te_plugin.bench.tables", "performance tables", markdown)

if __name__ == "__main__":
    sys.exit(BLOCK.main())
