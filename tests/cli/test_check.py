"""te-plugin check: every planned kernel is compared, per segment, and a kernel out of bounds fails the command."""

import pytest

from te_plugin import recipe_check
from te_plugin.cli import main

SMALL = ["data.seq_len=256", "model.num_layers=1"]


@pytest.mark.parametrize("recipe", ["llama_tiny", "llama_moe_tiny"])
def test_every_kernel_of_a_recipe_is_within_its_bounds(recipe, capsys):
    assert main(["check", f"recipe={recipe}", *SMALL]) == 0
    printed = capsys.readouterr().out
    for word in ("attention", "segment 1 [", "linear_qkv", "norm", "rope.q", "loss", "swiglu"):
        assert word in printed
    assert "FAIL" not in printed


@pytest.mark.parametrize("precision", ["fp32", "fp8_delayed", "fp8_block"])
def test_precisions_are_checked_against_their_own_definition(precision, capsys):
    assert main(["check", "recipe=llama_tiny", f"precision={precision}", *SMALL]) == 0


def test_a_kernel_outside_its_bound_fails_the_command(monkeypatch, capsys):
    monkeypatch.setitem(recipe_check.BOUNDS, "bf16", {**recipe_check.BOUNDS["bf16"], "gradient": 1e-6})
    assert main(["check", "recipe=llama_tiny", *SMALL]) == 1
    captured = capsys.readouterr()
    assert "FAIL" in captured.out and "outside their bounds" in captured.err


def test_damaged_dq_is_seen_in_every_segment_but_the_last():
    from te_plugin.config import compose
    from te_plugin.testing import sabotage

    cfg = compose(["recipe=llama_tiny", *SMALL])
    cfg.attention.kernel = sabotage.install()
    try:
        rows = [row for row in recipe_check.check(cfg) if row.output == "dq"]
    finally:
        sabotage.remove()
    assert len(rows) > 1 and all(row.error > 0.5 for row in rows), "dQ of all segments went to slot 0"
    assert all(row.ok for row in recipe_check.check(compose(["recipe=llama_tiny", *SMALL])) if row.output == "dq")
