"""The verdict of a run: one word, an exit code, and every number behind it (verdict.json)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_plugin.config.schema import ConfigError

VERDICT_FILE = "verdict.json"
EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2, "SUSPECT": 2}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run directory. ConfigError for one that a crash of the machine left empty or cut."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no keys")
        return found
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); remove it and resume that run, which writes it again") from error


@dataclass(frozen=True)
class Verdict:
    """status: PASS | FAIL | INCONCLUSIVE | SUSPECT; reason: one sentence; details: gates and numbers, JSON values."""

    status: str
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.status not in EXIT_CODES:
            raise ValueError(f"status {self.status!r} is not one of {', '.join(EXIT_CODES)}")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    @property
    def line(self) -> str:
        """The last line a command prints."""
        return f"verdict: {self.status}" + (f": {self.reason}" if self.reason and self.status != "PASS" else "")

    def save(self, run_dir: Path | str) -> None:
        data = {"status": self.status, "exit_code": self.exit_code, "reason": self.reason, "details": _finite(self.details)}
        path = Path(run_dir) / VERDICT_FILE
        temporary = path.with_name(VERDICT_FILE + ".tmp")
        temporary.write_text(json.dumps(data, indent=1, default=str, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, run_dir: Path | str) -> Verdict:
        data = read_json(Path(run_dir) / VERDICT_FILE)
        return cls(data["status"], data["reason"], data["details"])


def _finite(value: Any) -> Any:
    """The same without NaN and infinities, which JSON does not have: they become texts, as in metrics.jsonl."""
    from te_plugin.training.metrics import encode

    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else encode(value)
