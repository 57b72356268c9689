"""Static arguments of an op as one frozen dataclass that travels through torch.library as one string.

An op's schema must be made of tensors and primitives. One string keeps schemas stable when an option is added, keeps dispatch
cheap, and is a constant under torch.compile. The string is decoded once and cached.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

T = TypeVar("T", bound="Options")


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of the static arguments. Fields are str, int, float or bool (`str` fields hold no semicolon)."""

    def key(self) -> str:
        return ";".join([f"{getattr(self, name)!r}" for name in self.__dataclass_fields__])

    @classmethod
    def from_key(cls: type[T], key: str) -> T:
        return _decode(cls, key)


@functools.lru_cache(maxsize=4096)
def _decode(cls, key: str):
    convert = {"str": lambda text: text[1:-1], "int": int, "float": float, "bool": lambda text: text == "True"}
    fields = dataclasses.fields(cls)
    return cls(*[convert[field.type](text) for field, text in zip(fields, key.split(";"), strict=True)])
