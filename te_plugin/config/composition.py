"""From command-line overrides to a validated Config: Hydra chooses and merges the groups, the schema decides about the rest.

The order of strength, weakest first: schema defaults, group files, the recipe's values, groups chosen on the command line,
values given on the command line. So a choice made on the command line always wins over the recipe.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from te_plugin import paths
from te_plugin.config.loading import build, parse_text, read_yaml, schema_fields, schema_sections, unknown_key
from te_plugin.config.rules import validate
from te_plugin.config.schema import MISSING, Config, ConfigError

WHERE = "command line"
_OVERRIDE = re.compile(r"(?P<prefix>~|\+{0,2})(?P<key>[A-Za-z_][\w.@/-]*)(?P<equals>=?)(?P<value>.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Override:
    """One `key=value` of the command line. is_group: it chooses a file of a group."""

    key: str
    value: str
    is_group: bool


def compose(overrides: Sequence[str], *, for_run: bool = True, config_dir: str | Path | None = None) -> Config:
    """The validated Config of `recipe=NAME [group=choice ...] [key=value ...]`.

    for_run=False plans for a machine that may be elsewhere: no kernel is planned and no file of the user's is looked for.
    config_dir: a folder of the user's own group files (recipe/NAME.yaml, model/NAME.yaml, ...) beside the package's.
    Raises ConfigError, whose message says what was asked, why not, and what to change.
    """
    files = group_files(config_dir)
    parsed = [split_override(text, files) for text in overrides]
    choices = _group_choices(parsed, files)
    recipe = files["recipe"][choices["recipe"]]
    if "recipe" in _group_values("recipe", recipe).get("recipe", ()):
        raise ConfigError(f"{recipe}: a recipe begins with the line '# @package _global_', and this file has none; add it")
    composed, chosen = _hydra(tuple(choices.items()), config_dir)
    values = copy.deepcopy(composed)
    lineage = [("recipe", name) for name in _lineage(files["recipe"], recipe.stem)]
    for group, choice in (*chosen.items(), *lineage):
        _take_as_written(values, group, files[group][choice])
    for group, choice in choices.items():
        if group != "recipe":
            _merge(values, _group_values(group, files[group][choice]))
    for override in parsed:
        if not override.is_group:
            _set(values, override.key, parse_text(override.key, override.value, WHERE))
    cfg = build(values, f"recipe {choices['recipe']}")
    if "/" in cfg.recipe or cfg.recipe.startswith("."):
        raise ConfigError(f"{recipe}, recipe: {cfg.recipe}: the name is part of folder names; give one without / that begins "
                          f"with no dot")
    validate(cfg, for_run=for_run)
    return cfg


def groups() -> dict[str, tuple[str, ...]]:
    """Every Hydra group of the package with its choices."""
    return {group: tuple(files) for group, files in group_files().items()}


def group_files(config_dir: str | Path | None = None) -> dict[str, dict[str, Path]]:
    """group -> choice -> file, of the package and of the user's folder.

    ConfigError when the user's folder adds nothing, or hides a file of the package.
    """
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(paths.configs_dir().glob("*/*.yaml")):
        found.setdefault(path.parent.name, {})[path.stem] = path
    if config_dir is None:
        return found
    folder = Path(config_dir)
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: no such folder; give one that holds recipe/NAME.yaml or another group's files")
    added = [path for path in sorted(folder.glob("*/*.yaml")) if path.parent.name in found and path.is_file()]
    if not added:
        raise ConfigError(f"--config-dir {folder}: it holds no file of a group, GROUP/NAME.yaml; groups are {', '.join(found)}")
    for path in added:
        if path.stem in found[path.parent.name]:
            raise ConfigError(f"{path}: {path.parent.name}={path.stem} is a file of the package already; give it another name")
        found[path.parent.name][path.stem] = path
    return found


def split_override(text: str, files: Mapping[str, Mapping[str, Path]] | None = None) -> Override:
    """Parse one override and check that its key exists. ConfigError otherwise, with the nearest key."""
    match = _OVERRIDE.fullmatch(text)
    if not match:
        raise ConfigError(f"{WHERE}: {text!r} is not understood; write key=value or group=choice")
    prefix, key, value = match["prefix"], match["key"], match["value"]
    if prefix == "~":
        raise ConfigError(f"{WHERE}: {text!r} would delete a key; every key is needed: give it a value instead")
    known_groups = {group: tuple(choices) for group, choices in (files or group_files()).items()}
    if not match["equals"]:
        wanted = f"recipe={key}" if key in known_groups["recipe"] else f"{key}=VALUE"
        raise ConfigError(f"{WHERE}: {text!r} has no value; write {wanted}")
    if key in known_groups:
        return Override(key, _group_choice(key, value, known_groups[key]), is_group=True)
    if key in schema_sections():
        raise ConfigError(f"{WHERE}: {text!r} sets a whole section; set its keys one by one: "
                          f"{', '.join(k for k in schema_fields() if k.startswith(key + '.'))}")
    if key not in schema_fields():
        owners = [group for group, names in known_groups.items() if key in names]
        if owners:
            raise ConfigError(f"{WHERE}: {key!r} is no key but a choice of the group {owners[0]}; write {owners[0]}=NAME, one "
                              f"of: {', '.join(known_groups[owners[0]])}")
        if "." not in key:
            near = difflib.get_close_matches(key, [*known_groups, *schema_sections()], n=1, cutoff=0.5)
            if near:
                kind = "the nearest group is" if near[0] in known_groups else "the nearest section is"
                raise ConfigError(f"{WHERE}: there is no key {key!r}; {kind} {near[0]!r}")
        raise unknown_key(key, WHERE)
    group, _, field = key.partition(".")
    if field == "name" and group in known_groups:
        raise ConfigError(f"{WHERE}: {key} belongs to the group file; choose one with {group}={value} "
                          f"({', '.join(known_groups[group])})")
    return Override(key, value, is_group=False)


def _group_choice(group: str, value: str, choices: tuple[str, ...]) -> str:
    value = value.removesuffix(".yaml").strip("'\"")
    if value in ("", "null"):
        raise ConfigError(f"{WHERE}: {group} cannot be empty; choose one of: {', '.join(choices)}")
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1, cutoff=0.4)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ConfigError(f"{WHERE}: {group}={value} does not exist{hint}; choose one of: {', '.join(choices)}")
    return value


def _group_choices(parsed: Sequence[Override], files: Mapping[str, Mapping[str, Path]]) -> dict[str, str]:
    choices: dict[str, str] = {}
    for override in parsed:
        if override.is_group:
            if override.key in choices and choices[override.key] != override.value:
                raise ConfigError(f"{WHERE}: {override.key} is chosen twice: {choices[override.key]} and {override.value}")
            choices[override.key] = override.value
    if "recipe" not in choices:
        raise ConfigError(f"{WHERE}: no recipe is chosen; add recipe=NAME, one of: {', '.join(files['recipe'])}")
    return choices


@functools.lru_cache(maxsize=256)
def _hydra(choices: tuple[tuple[str, str], ...], config_dir: str | Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged groups and recipe as nested dictionaries, and the choice of each group. Cached: the files do not change while a
    process runs.
    """
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    overrides = [f"{group}={_quoted(choice)}" for group, choice in choices]
    if config_dir is not None:
        overrides.append(f"hydra.searchpath=[{_quoted(f'file://{Path(config_dir).resolve()}')}]")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(paths.configs_dir()), version_base="1.3"):
            composed = hydra_compose("config", overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{' '.join(overrides)}: the groups do not compose: {error}") from error
    values = OmegaConf.to_container(composed, resolve=False)
    chosen = values.pop("hydra")["runtime"]["choices"]
    return values, {group: choice for group, choice in chosen.items() if isinstance(values.get(group), dict) and choice}


def _quoted(text: str) -> str:
    """A text that Hydra's grammar takes as it is, whatever characters it has."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", text)) + "'"


def _lineage(recipes: Mapping[str, Path], name: str) -> Iterator[str]:
    """The recipes that a recipe builds on through its defaults list, then itself."""
    defaults = _group_values("recipe", recipes[name]).get("defaults") or ()
    for entry in defaults:
        base = entry.removeprefix("/recipe/") if isinstance(entry, str) else None
        if base in recipes:
            yield from _lineage(recipes, base)
    yield name


def _take_as_written(values: dict[str, Any], group: str, path: Path) -> None:
    """Where a composed value is the one of this file, take it as the schema's reader does: Hydra reads YAML 1.1, in which 12:30
    is 750 and off is false.
    """
    from omegaconf import OmegaConf

    written = _group_values(group, path)
    read = OmegaConf.to_container(OmegaConf.load(path), resolve=False)

    def take(into: dict[str, Any], read: Mapping[str, Any], written: Mapping[str, Any]) -> None:
        for key, value in written.items():
            if isinstance(value, Mapping):
                if isinstance(into.get(key), dict):
                    take(into[key], read[key], value)
            elif key in into and into[key] == read[key] and value != MISSING:
                into[key] = value

    take(values, read if _is_global(path) else {group: read}, written)


def _group_values(group: str, path: Path) -> dict[str, Any]:
    """What a group file sets, as nested dictionaries from the root."""
    values = read_yaml(_text(path), str(path))
    if "hydra" in values:
        raise unknown_key("hydra", str(path))  # Hydra would take it for settings of its own, and nothing here reads those
    return values if _is_global(path) else {group: values}


def _is_global(path: Path) -> bool:
    return re.search(r"^# @package _global_$", _text(path), re.MULTILINE) is not None


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration: {error}") from error
    if text.startswith("\ufeff"):
        raise ConfigError(f"{path} begins with a byte order mark; save it as UTF-8 without one")
    return text


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif value != MISSING:
            into[key] = value


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value
