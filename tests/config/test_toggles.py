"""A feature toggle changes speed or memory, not the model: the cells of the toggle groups, compared byte for byte."""

import dataclasses
import itertools
import json

import pytest

from te_plugin import paths
from te_plugin.config import ConfigError, compose, recipe_hash
from te_plugin.config.composition import groups
from te_plugin.config.loading import read_yaml

TOGGLES = ("precision", "layout", "attention", "parallel")
SECTIONS = ("model", "data", "optim", "schedule", "run", "track", "check", "accept", "testing")


def sections(cfg) -> str:
    return json.dumps({name: dataclasses.asdict(getattr(cfg, name)) for name in SECTIONS})


def choices(group: str) -> list[str]:
    return [f"{group}={choice}" for choice in groups()[group]]


def every_cell() -> list[tuple[str, ...]]:
    return [("recipe=llama_tiny", *cell) for cell in itertools.product(*(choices(group) for group in TOGGLES))]


def a_third_of_the_cells() -> list[tuple[str, ...]]:
    """Every triple of precision, layout and parallel, with the attention choices dealt to them in turn; and grouped GEMM."""
    attention = itertools.cycle(choices("attention"))
    dense = [("recipe=llama_tiny", *cell, next(attention))
             for cell in itertools.product(choices("precision"), choices("layout"), choices("parallel"))]
    grouped = itertools.product(choices("precision"), ("moe.grouped_gemm=true", "moe.grouped_gemm=false"))
    return dense + [("recipe=llama_moe_tiny", *cell) for cell in grouped]


def check(cells: list[tuple[str, ...]]) -> None:
    for cell in cells:
        base = compose([cell[0]], for_run=False)
        try:
            cfg = compose(cell, for_run=False)
        except ConfigError as error:
            pytest.fail(f"{cell} does not compose: {error}")
        assert sections(cfg) == sections(base), cell
        assert recipe_hash(cfg) == recipe_hash(base), cell


@pytest.mark.parametrize("group", [*TOGGLES, "moe"])
def test_the_files_of_a_toggle_set_nothing_of_model_data_optimizer_schedule_or_run(group):
    for path in (paths.configs_dir() / group).glob("*.yaml"):
        text = path.read_text()
        sets = set(read_yaml(text, str(path))) if "@package _global_" in text else {group}
        assert sets <= {*TOGGLES, "moe"}, path


def test_no_toggle_touches_model_data_optimizer_schedule_or_run():
    check(a_third_of_the_cells())


@pytest.mark.slow
def test_no_cell_of_the_toggles_touches_model_data_optimizer_schedule_or_run():
    assert len(every_cell()) >= 7 * 2 * 5 * 3
    check(every_cell())


def test_the_experts_of_a_moe_group_leave_the_other_sections_alone():
    dense = compose(["recipe=llama_moe_tiny", "moe=dense"], for_run=False)
    sparse = compose(["recipe=llama_moe_tiny"], for_run=False)
    assert sections(dense) == sections(sparse)
    assert recipe_hash(dense) != recipe_hash(sparse)


def test_one_toggle_changes_its_own_section_only():
    base = dataclasses.asdict(compose(["recipe=llama_tiny"], for_run=False))
    other = dataclasses.asdict(compose(["recipe=llama_tiny", "layout=bshd"], for_run=False))
    assert {name for name in base if base[name] != other[name]} == {"layout"}
