"""What a model file says about the model: every value is there and of its kind, or one clear error names the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from te_plugin.config.schema import ConfigError


class Header:
    """The keys of a header, read by kind. where: the file, and what stands before its keys, for messages."""

    def __init__(self, values: Any, where: str):
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} is {_short(values)} where keys are expected; the file is damaged")
        self.values, self.where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; the default where the key is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1, such as a size."""
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
            raise ConfigError(f"{self.where}: {key} is {_short(value)}, where a whole number of at least 1 is expected")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, such as an epsilon or a base."""
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{self.where}: {key} is {_short(value)}, where a number above 0 is expected")
        return float(value)

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where} does not say {key}; a llama needs it")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
