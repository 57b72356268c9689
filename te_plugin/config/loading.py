"""Strict building of a Config from text and from nested dictionaries.

One rule for every source (group files, command line, config.resolved.yaml): the field's type decides what a value may be.
On/off fields take true or false and nothing else, whole numbers are whole, text stays the text that was written
(`run_name: 1E234` is a name), and an unknown key is an error that names the nearest key there is.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from te_plugin.config.schema import MISSING, Config, ConfigError

# ---- the fields of the schema, by dotted name ----

@dataclasses.dataclass(frozen=True)
class FieldType:
    """kind: bool, int, float or str. optional: null is a value."""

    kind: type
    optional: bool

    @property
    def words(self) -> str:
        text = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[self.kind]
        return text + (" or null" if self.optional else "")


@functools.cache
def schema_fields(cls: type = Config, prefix: str = "") -> Mapping[str, FieldType]:
    """Every leaf of the schema: dotted key -> type."""
    found: dict[str, FieldType] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            found.update(schema_fields(hint, key + "."))
            continue
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        kinds = [option for option in options if option is not type(None)]
        found[key] = FieldType(kinds[0], optional=len(kinds) != len(options))
    return types.MappingProxyType(found)


@functools.cache
def schema_sections(cls: type = Config, prefix: str = "") -> tuple[str, ...]:
    """Every section of the schema: the dotted names that hold other keys."""
    found = []
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found += [prefix + name, *schema_sections(hint, f"{prefix}{name}.")]
    return tuple(found)


def unknown_key(key: str, where: str) -> ConfigError:
    """The error for a key that no field has, naming the nearest one."""
    section, _, name = key.rpartition(".")
    known_sections = ("", *schema_sections())
    near_section = section if section in known_sections else (_nearest(section, schema_sections()) or "")
    names = [k.rpartition(".")[2] for k in schema_fields() if k.rpartition(".")[0] == near_section]
    elsewhere = [k for k in schema_fields() if k.rpartition(".")[2] == name]
    if elsewhere:
        near = elsewhere[0]
    elif name_near := _nearest(name, names) if near_section else None:
        near = f"{near_section}.{name_near}"
    else:
        near = _nearest(key, schema_fields(), cutoff=0.0)
    hint = f"; keys of {near_section}: {', '.join(names)}" if near_section else ""
    return ConfigError(f"{where}: there is no key {key!r}; the nearest is {near!r}{hint}")


def _nearest(word: str, words, cutoff: float = 0.3) -> str | None:
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return found[0] if found else None


# ---- one value ----

# Longer numbers fit no field, and Python refuses to read those of thousands of digits.
_INT = re.compile(r"[-+]?\d(_?\d){0,39}")
_FLOAT = re.compile(r"[-+]?((\d+(_\d+)*)?\.\d+|\d+(_\d+)*\.?)([eE][-+]?\d+)?|[-+]?\.?(inf|nan)", re.IGNORECASE)


def parse_text(key: str, text: str, where: str) -> Any:
    """The value of a field from the text after `=` on the command line."""
    kind = schema_fields()[key]
    _refuse_interpolation(key, text, where)
    if kind.optional and text == "null":
        return None
    if kind.kind is str:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return check_value(key, text[1:-1] if quoted else text, where)
    if kind.kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind.kind is int and _INT.fullmatch(text):
        return int(text)
    if kind.kind is float and _FLOAT.fullmatch(text):
        return check_value(key, float(text.lower().replace(".inf", "inf").replace(".nan", "nan")), where)
    raise _wrong_type(key, text, where)


def check_value(key: str, value: Any, where: str) -> Any:
    """A value that already has a Python type, against the type of its field. Whole numbers serve as floats, and a number of a
    file serves as the text that was written.
    """
    kind = schema_fields()[key]
    if isinstance(value, (_WrittenInt, _WrittenFloat)):
        value = value.text if kind.kind is str else type(value).__base__(value)
    if value is None and kind.optional:
        return None
    if kind.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind.kind:
        raise _wrong_type(key, value, where)
    if kind.kind is float and not math.isfinite(value):
        raise ConfigError(f"{where}: {key}={value} is not finite; give a finite number")
    if kind.kind is str:
        _refuse_interpolation(key, value, where)
    if kind.kind is str and value == "":
        raise ConfigError(f"{where}: {key} is empty; give a text" + (" or null" if kind.optional else ""))
    return value


def _refuse_interpolation(key: str, text: str, where: str) -> None:
    if "${" in text:
        raise ConfigError(f"{where}: {key} holds an interpolation; write the value itself")


def _wrong_type(key: str, value: Any, where: str) -> ConfigError:
    kind = schema_fields()[key]
    shown = repr(value) if not isinstance(value, str) else value or "(empty)"
    shown = shown if len(shown) <= 100 else f"{shown[:40]}... ({len(shown)} characters)"
    why = ""
    if kind.kind is bool:
        why = "; on/off fields accept only true and false, so that no word can be taken for the other"
    elif kind.kind is str:
        why = "; put it in quotes"
    elif kind.kind is int and isinstance(value, (float, str)) and _FLOAT.fullmatch(str(value)):
        number = float(value)
        if number.is_integer():
            why = f"; write {int(number)}"
    return ConfigError(f"{where}: {key} takes {kind.words}, not {shown}{why}")


# ---- a whole config ----

def build(values: Mapping[str, Any], where: str) -> Config:
    """A Config from nested dictionaries: every key known, every field present and of its type. Runs no cross-field rule."""
    return _build(Config, values, "", where)


def _build(cls: type, values: Mapping[str, Any], prefix: str, where: str):
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in hints:
            raise unknown_key(f"{prefix}{name}", where)
    arguments = {}
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            section = values.get(field.name, {})
            if not isinstance(section, Mapping):
                shown = "null" if section is None else repr(section)
                raise ConfigError(f"{where}: {key} is a section and cannot be {shown}; give its keys, or leave it out")
            arguments[field.name] = _build(hint, section, key + ".", where)
        elif field.name in values and values[field.name] != MISSING:
            arguments[field.name] = check_value(key, values[field.name], where)
        elif field.default == MISSING or field.name in values:
            raise ConfigError(f"{where}: {key} is not set; it takes {schema_fields()[key].words}: add {key}=VALUE")
    return cls(**arguments)


# ---- YAML in which text stays text ----

class _WrittenInt(int):
    """A whole number of a file, with its text."""

    text: str


class _WrittenFloat(float):
    """A number of a file, with its text."""

    text: str


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `on`, `off`, `yes` and `no` are text; 1e-5 is a number."""


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that _Loader would read as something else."""


_RESOLVERS = [("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), "tfTF"),
              ("tag:yaml.org,2002:null", re.compile(r"^(null|~|)$"), ["n", "~", ""]),
              ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]{1,40}$"), "-+0123456789"),
              ("tag:yaml.org,2002:float", re.compile(
                  r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
               "-+0123456789.")]
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _RESOLVERS:
        _class.add_implicit_resolver(_tag, _pattern, list(_first))


def _construct_int(loader, node):
    text = loader.construct_scalar(node)
    value = _WrittenInt(text)
    value.text = text
    return value


def _construct_float(loader, node):
    text = loader.construct_scalar(node)
    value = _WrittenFloat(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    value.text = text
    return value


def _construct_mapping(loader, node):
    keys = [key.value for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
    return dict(loader.construct_pairs(node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """A YAML mapping, strictly read. ConfigError for anything else."""
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: this is no valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: this holds no keys; a configuration is a YAML mapping")
    return values


def loads(text: str, where: str = "configuration") -> Config:
    """A Config from the text that to_yaml() wrote. Types and keys are checked; cross-field rules are validate()'s."""
    return build(read_yaml(text, where), where)


def load(path: str | Path) -> Config:
    """The Config in a config.resolved.yaml. As strict as the command line; ConfigError names the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration: {error}") from error
    return loads(text, str(path))


def to_yaml(cfg: Config) -> str:
    """The whole Config as YAML; load() gives the same Config back."""
    return yaml.dump(dataclasses.asdict(cfg), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
