"""A feature toggle changes speed or memory, not the model: every cell of the toggle groups, compared byte for byte."""

import dataclasses
import itertools
import json

import pytest

from te_plugin.config import ConfigError, compose, recipe_hash
from te_plugin.config.composition import groups

TOGGLES = ("precision", "layout", "attention", "parallel")
SECTIONS = ("model", "data", "optim", "schedule", "run", "track", "check", "accept", "testing")


def sections(cfg) -> str:
    return json.dumps({name: dataclasses.asdict(getattr(cfg, name)) for name in SECTIONS})


def cells() -> list[tuple[str, ...]]:
    """Every combination for the dense recipe; precision, layout and grouped GEMM on and off for the one with experts."""
    dense = itertools.product(*([f"{name}={choice}" for choice in groups()[name]] for name in TOGGLES))
    grouped = itertools.product(*([f"{name}={choice}" for choice in groups()[name]] for name in ("precision", "layout")),
                                ("moe.grouped_gemm=true", "moe.grouped_gemm=false"))
    return [("recipe=llama_tiny", *cell) for cell in dense] + [("recipe=llama_moe_tiny", *cell) for cell in grouped]


def test_no_cell_of_the_toggles_touches_model_data_optimizer_schedule_or_run():
    assert len(cells()) >= 7 * 2 * 5 * 3 + 7 * 2 * 2
    for cell in cells():
        base = compose([cell[0]], for_run=False)
        try:
            cfg = compose(cell, for_run=False)
        except ConfigError as error:
            pytest.fail(f"{cell} does not compose: {error}")
        assert sections(cfg) == sections(base), cell
        assert recipe_hash(cfg) == recipe_hash(base), cell


def test_the_experts_of_a_moe_group_leave_the_other_sections_alone():
    dense = compose(["recipe=llama_moe_tiny", "moe=dense"], for_run=False)
    sparse = compose(["recipe=llama_moe_tiny"], for_run=False)
    assert sections(dense) == sections(sparse)
    assert recipe_hash(dense) != recipe_hash(sparse)


def test_the_default_cell_differs_from_the_others_only_in_the_toggled_sections():
    base = dataclasses.asdict(compose(["recipe=llama_tiny"], for_run=False))
    other = dataclasses.asdict(compose(["recipe=llama_tiny", "layout=bshd"], for_run=False))
    assert {name for name in base if base[name] != other[name]} == {"layout"}
