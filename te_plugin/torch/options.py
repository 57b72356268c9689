"""Static arguments of an op as one frozen dataclass that travels through torch.library as one string.

An op's schema must be made of tensors and primitives. One string keeps schemas stable when an option is added, keeps dispatch
cheap, and is a constant under torch.compile. The string is decoded once and cached.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import torch

T = TypeVar("T", bound="Options")


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of the static arguments. Fields are str, int, float or bool (`str` fields hold no semicolon)."""

    def key(self) -> str:
        if torch.compiler.is_compiling():
            return self._spelled()
        key = self.__dict__.get("_key")
        if key is None:
            key = self.__dict__["_key"] = self._spelled()  # spelled once an object; `options` gives the same object again
        return key

    def _spelled(self) -> str:
        return ";".join([f"{getattr(self, name)!r}" for name in self.__dataclass_fields__])

    @classmethod
    def from_key(cls: type[T], key: str) -> T:
        return _decode(cls, key)


def options(cls: type[T], *values) -> T:  # noqa: UP047 (the base class below uses T as well)
    """cls(*values), the same object for the same values: making a frozen dataclass costs more than looking it up."""
    return cls(*values) if torch.compiler.is_compiling() else _made(cls, *values)


@functools.lru_cache(maxsize=4096, typed=True)  # typed: 1 and True are equal but not spelled alike
def _made(cls, *values):
    return cls(*values)


@functools.lru_cache(maxsize=4096)
def _decode(cls, key: str):
    fields, parts = dataclasses.fields(cls), key.split(";")
    if len(parts) != len(fields):
        raise ValueError(f"a name holds a semicolon: {key}")
    return cls(*[_value(field, text) for field, text in zip(fields, parts, strict=True)])


def _value(field: dataclasses.Field, text: str):
    if field.type != "str":
        return {"int": int, "float": float, "bool": lambda text: text == "True"}[field.type](text)
    if text[0] not in "'\"":  # what was given is no string: a flag, a number, None
        raise ValueError(f"{field.name}={text} must be a name (a str)")
    return text[1:-1]
