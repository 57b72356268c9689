"""The golden check of llama_tiny on its real curve: damage of each kind exits 1 within seconds, legal toggles pass.

Runs are cut short: a paired gap shows damage long before the loss itself would. The whole curve is what `make demo` checks.
"""

import json

import pytest

from te_plugin.config import compose
from te_plugin.convergence import Golden
from te_plugin.convergence.golden import golden_path
from te_plugin.plan import registered
from te_plugin.training.run import train


def run(tmp_path, steps, *overrides):
    fixed = ["recipe=llama_tiny", "run.device=cpu", "run.threads=2", "track=jsonl", "schedule.eval_rows=2"]
    return train(compose([*fixed, f"schedule.stop_after_steps={steps}", *overrides]), tmp_path)


@pytest.mark.parametrize(
    "steps, overrides, gate",
    [
        (20, ["testing.sabotage=no_document_mask"], "curve"),
        (20, ["optim.lr=4e-3"], "curve"),
        (64, ["testing.sabotage=dq_slot0"], "curve"),
    ],
    ids=["no_document_mask", "doubled_lr", "dq_slot0"],
)
def test_damage_fails(tmp_path, steps, overrides, gate):
    verdict = run(tmp_path, steps, *overrides)
    assert verdict.status == "FAIL" and verdict.exit_code == 1, verdict.reason
    assert f"{gate}: " in verdict.reason
    assert "sabotage_dq_slot0" not in {kernel.name for kernel in registered("attention")}, "the damage outlives its run"


@pytest.mark.parametrize("overrides", [[], ["precision=bf16", "layout=bshd"]], ids=["itself", "bf16-bshd"])
def test_legal_toggles_pass(tmp_path, overrides):
    verdict = run(tmp_path, 20, *overrides)
    assert verdict.status == "PASS", verdict.reason
    gates = {g["name"]: g for g in json.loads((tmp_path / "verdict.json").read_text())["details"]["gates"]}
    assert gates["curve"]["numbers"]["steps"] == 20 and gates["curve"]["numbers"]["largest_fraction_of_band"] < 1


def test_the_golden_file_is_of_this_recipe_and_says_how_its_noise_was_measured():
    golden = Golden.load(golden_path("llama_tiny"))
    from te_plugin.config import recipe_hash

    cfg = compose(["recipe=llama_tiny"], for_run=False)
    assert golden.recipe_hash == recipe_hash(cfg) and golden.header["reason"]
    steps = cfg.schedule.tokens // (cfg.schedule.global_rows * cfg.data.seq_len)
    assert all([row["step"] for row in arm.rows] == list(range(1, steps + 1)) for arm in golden.arms.values())
    measured = golden.header["band"]["measured"]
    assert golden.header["arm"] == cfg.precision.name and all(len(measured[name]) >= 2 for name in golden.arms)
    final = sum(row["loss"] for row in golden.arm_for(cfg.precision.name).rows[-10:]) / 10
    assert final < golden.header["context_free_entropy"] - 0.5
