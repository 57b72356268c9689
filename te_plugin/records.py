"""JSON records of the product's own, read strictly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def parse(text: str) -> Any:
    """The value of a JSON text. ValueError where it is none, or where an object names a key twice: JSON lets the last one win."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"the key {', '.join(map(repr, twice))} is there more than once")
    return found
