"""A golden curve passes its twins, and fails what is not the same training: worse, better, diverged, or another recipe."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from te_plugin.config import compose
from te_plugin.convergence import Golden, GoldenError, Verdict, golden
from te_plugin.convergence.check import RunFacts, curve_gates, health_gate, learned_gate, rows_gate
from te_plugin.training import record

STEPS = 120


def curve(rng, noise=0.0, shift=0.0, slope=0.0, norm=1.0):
    """A loss curve with paired noise that grows as two trainings drift apart."""
    steps = np.arange(1, STEPS + 1)
    base = (
        2.0 + 4.0 * np.exp(-steps / 30) + 0.05 * np.sin(steps)
    )  # the sine stands for easy and hard batches: it is common
    drift = noise * rng.standard_normal(STEPS) * steps / STEPS
    loss = base + drift + shift + slope * steps / STEPS
    return [
        {
            "step": int(s),
            "train/tokens": int(s) * 100,
            "train/loss": float(v),
            "train/grad_norm": float(norm * (1 + 0.05 * d)),
        }
        for s, v, d in zip(steps, loss, drift, strict=True)
    ]


@pytest.fixture
def recorded(rng):
    header = {"recipe": "r", "recipe_hash": "h", "order_hash": "o", "init_hash": "i", "reason": "test"}
    runs = {"fp8_current": curve(rng), "bf16": curve(rng, slope=-0.1)}
    return golden.build(
        header,
        runs,
        {
            arm: {f"twin{i}": curve(rng, noise=0.01, slope=slope) for i in range(3)}
            for arm, slope in (("fp8_current", 0.0), ("bf16", -0.1))
        },
    )


FACTS = RunFacts("h", "o", "i", 384, STEPS, 3.0)


def status(rows, recorded, facts=FACTS, precision="fp8_current"):
    gates = curve_gates(rows, facts, recorded, "r", precision)
    return None if any(g.passed is None for g in gates) else all(g.passed for g in gates)


def test_fresh_twins_pass(recorded, rng):
    assert all(status(curve(rng, noise=0.01), recorded) for _ in range(50))


@pytest.mark.parametrize(
    "wrong", [dict(shift=0.02), dict(shift=-0.02), dict(slope=0.05), dict(slope=-0.05), dict(norm=1.1), dict(norm=0.9)]
)
def test_small_lasting_differences_fail_in_both_directions(recorded, rng, wrong):
    assert status(curve(rng, noise=0.01, **wrong), recorded) is False


def test_a_precision_is_held_to_its_own_arm_and_an_unknown_one_to_the_wide_band(recorded, rng):
    between = curve(rng, noise=0.01, slope=-0.05)
    assert status(curve(rng, noise=0.01, slope=-0.1), recorded, precision="bf16") is True
    assert status(between, recorded, precision="bf16") is False
    assert status(between, recorded) is False
    assert status(between, recorded, precision="fp8_block") is True
    assert status(curve(rng, noise=0.01, slope=-0.4), recorded, precision="fp8_block") is False


def test_the_other_arms_of_a_fast_recipe_add_up_as_their_precision_does_by_default():
    cfg = compose(["recipe=llama_tiny", "run.device=cpu", "precision.forward_accumulation=fast"], for_run=False)
    found = {arm.precision.name: arm.precision.forward_accumulation for arm in record.arms(cfg, SimpleNamespace(size=1))}
    assert found == {"fp8_current": "fast", "bf16": "fp32", "fp8_delayed": "fp32"}


def test_a_loss_that_is_too_low_fails_and_hints_at_a_leak(recorded, rng):
    gates = {g.name: g for g in curve_gates(curve(rng, slope=-0.1), FACTS, recorded, "r", "fp8_current")}
    assert (
        gates["curve"].passed is False
        and "other documents" in gates["curve"].message
        and "below" in gates["curve"].message
    )


def test_a_diverged_run_fails_and_names_the_step(recorded, rng):
    rows = curve(rng)
    rows[60]["train/loss"] = math.nan
    assert status(rows, recorded) is False
    gate = health_gate(rows)
    assert gate.passed is False and "step 61" in gate.message


def test_what_the_last_update_broke_is_seen_in_the_held_out_loss(rng, tmp_path):
    """A step's own loss comes before its update; and a verdict that holds NaN is still JSON, which has no NaN."""
    rows = curve(rng)
    rows[-1]["val/loss"] = math.nan
    gate = health_gate(rows)
    assert gate.passed is False and f"step {STEPS}" in gate.message
    Verdict("FAIL", "diverged", {"val_loss": math.nan, "gates": [{"gap": [math.inf, -math.inf, 1.5]}]}).save(tmp_path)
    written = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=pytest.fail)
    assert written["details"] == {"val_loss": "NaN", "gates": [{"gap": ["Infinity", "-Infinity", 1.5]}]}


@pytest.mark.parametrize(
    "field, named", [("recipe_hash", "recipe hash"), ("order_hash", "data order"), ("init_hash", "initial weights")]
)
def test_another_recipe_order_or_start_is_not_judged(recorded, rng, field, named):
    facts = RunFacts(**{**FACTS.__dict__, field: "other"})
    (gate,) = curve_gates(curve(rng), facts, recorded, "r", "fp8_current")
    assert gate.passed is None and named in gate.message


def test_too_few_steps_are_not_judged(recorded, rng):
    assert status(curve(rng)[:19], recorded) is None
    assert status(curve(rng)[:20], recorded) is True


@pytest.mark.parametrize("kept", [slice(40, None), slice(None, None, 2), slice(None, 50), slice(0, 0)])
def test_a_curve_with_holes_is_not_judged(rng, kept):
    """Its steps were compared as far as there were any: https://github.com/NVIDIA/Megatron-LM/issues/3097"""
    gate = rows_gate(curve(rng)[kept], STEPS)
    assert gate.passed is None and f"of {STEPS} steps" in gate.message
    assert rows_gate(curve(rng), STEPS).passed and rows_gate(curve(rng)[:50], 50).passed


def test_a_golden_curve_that_was_cut_judges_nothing(recorded, rng):
    short = golden.Golden(recorded.header, {name: golden.Arm(name, arm.rows[:50]) for name, arm in recorded.arms.items()})
    assert status(curve(rng), short) is None and status(curve(rng)[:50], short) is True


@pytest.mark.parametrize("change, message", [
    (lambda rows: rows[5].update(band=None), "band=None at step 6 of arm fp8_current"),
    (lambda rows: rows[5].update(band=0), "band=0 at step 6"),
    (lambda rows: rows[5].update(loss=math.nan), "loss=nan at step 6"),
    (lambda rows: rows[5].update(loss="2.0"), "loss='2.0' at step 6"),
    (lambda rows: rows[5].pop("wide_band"), "wide_band"),
    (lambda rows: rows.pop(5), "the steps of arm fp8_current are not 1, 2, 3"),
    (lambda rows: rows.insert(5, dict(rows[5])), "the steps of arm fp8_current are not 1, 2, 3"),
])  # fmt: skip
def test_a_golden_curve_that_was_damaged_is_refused_before_the_run(recorded, tmp_path, change, message):
    change(recorded.arms["fp8_current"].rows)
    recorded.save(tmp_path / "golden.jsonl")
    with pytest.raises(GoldenError, match=message):
        Golden.load(tmp_path / "golden.jsonl")


def test_a_model_that_learned_no_context_fails(rng):
    assert learned_gate(curve(rng, shift=2.0), FACTS).passed is False
    assert learned_gate(curve(rng), FACTS).passed is True
    assert learned_gate(curve(rng)[:50], FACTS).passed is None


def test_golden_files_read_back_and_say_why_and_how(recorded, tmp_path):
    path = tmp_path / "r" / "golden.jsonl"
    recorded.save(path)
    back = Golden.load(path)
    assert back == recorded and set(back.arms) == {"fp8_current", "bf16"}
    header = json.loads(path.read_text().splitlines()[0])
    assert (
        header["reason"] == "test"
        and set(header["band"]["measured"]["bf16"]) == {"twin0", "twin1", "twin2"}
        and "10-step" in header["band"]["how"]
    )
    bands = [row["band"] for row in back.arm_for("fp8_current").rows]
    assert bands == sorted(bands) and bands[0] >= golden.LOSS_FLOOR


@pytest.mark.parametrize("damage", ["", "{}\n", '{"golden": 1, "recipe": "r"}\n', "not json\n"])
def test_a_damaged_golden_file_is_a_clear_error(tmp_path, damage):
    path = tmp_path / "golden.jsonl"
    path.write_text(damage)
    with pytest.raises(GoldenError, match="check.mode=record"):
        Golden.load(path)


@pytest.mark.parametrize("damage", ["a key twice", "a row twice"])
def test_a_golden_file_that_says_something_twice_is_damaged(recorded, tmp_path, damage):
    """In JSON the last one of two wins, and nobody could tell which loss was recorded."""
    path = tmp_path / "golden.jsonl"
    recorded.save(path)
    text = path.read_text()
    path.write_text(text.replace('"loss":', '"loss": 1.0, "loss":', 1) if damage == "a key twice" else
                    text + text.splitlines()[-1] + "\n")
    with pytest.raises(GoldenError, match="more than once"):
        Golden.load(path)


def test_a_band_is_measured_on_whole_twins_or_not_made(rng):
    with pytest.raises(GoldenError, match="measured"):
        golden.build({}, {"bf16": curve(rng)}, {})
    with pytest.raises(GoldenError, match="119 of the 120"):
        golden.build({}, {"bf16": curve(rng)}, {"bf16": {"short": curve(rng)[:-1]}})
    broken = curve(rng)
    broken[5]["train/loss"] = math.inf
    with pytest.raises(GoldenError, match="not finite"):
        golden.build({}, {"bf16": curve(rng)}, {"bf16": {"broken": broken}})


def test_a_recording_that_was_interrupted_goes_on_with_what_is_not_done(rng, tmp_path, monkeypatch):
    """A twin that a signal stopped, or that failed, has a verdict too: it runs again instead of standing for a whole one."""
    monkeypatch.setattr("te_plugin.convergence.golden.recipes_dir", lambda: tmp_path / "recipes")
    cfg = compose(["recipe=llama_tiny", "check.mode=record", "check.reason=test"], for_run=False)
    world = SimpleNamespace(size=1, dp_size=1, is_main=True, device=torch.device("cpu"), broadcast_object=lambda value: value)
    ran = []

    def write(folder, verdict):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve(rng, noise=0.01)))
        verdict.save(folder)
        return verdict

    def run_twin(cfg, folder):
        ran.append(folder.name)
        return write(folder, Verdict("INCONCLUSIVE", "interrupted") if len(ran) == 2 else Verdict("PASS"))

    write(tmp_path / "run", Verdict("PASS"))
    first = record.record(cfg, tmp_path / "run", FACTS, world, run_twin)
    assert first.status == "FAIL" and "interrupted" in first.reason and len(ran) == 2
    assert record.record(cfg, tmp_path / "run", FACTS, world, run_twin).status == "PASS"
    assert ran[1] == ran[2] and len(ran[1:]) == len(set(ran)), "the interrupted one again, every other one once"


def test_smoothing_is_the_mean_of_the_last_window():
    values = [float(v) for v in range(25)]
    found = golden.smoothed(values, 10)
    assert found[0] == 0 and found[4] == 2.0 and found[24] == sum(range(15, 25)) / 10


@pytest.mark.parametrize("word, code", [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 2), ("SUSPECT", 2)])
def test_verdicts_have_fixed_exit_codes_and_read_back(tmp_path, word, code):
    verdict = Verdict(word, "because", {"a": 1})
    verdict.save(tmp_path)
    assert Verdict.load(tmp_path) == verdict and verdict.exit_code == code
    assert verdict.line == ("verdict: PASS" if word == "PASS" else f"verdict: {word}: because")
