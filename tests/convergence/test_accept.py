"""Paired acceptance: passes a twin-like candidate, fails what is worse, suspects what is too good, says when it cannot tell."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from te_plugin.config import ConfigError, compose, to_yaml, validate
from te_plugin.convergence import Verdict
from te_plugin.convergence.accept import Arm, accept, arms_of, judge
from te_plugin.convergence.statistics import paired_mean, slope, spikes, t_cdf, t_quantile

STEPS = 200


def config(*overrides, model="llama3_2_1b"):
    base = ["recipe=llama_tiny", f"model={model}", "run.device=cpu", "accept.seeds=3", "schedule.warmup_tokens=10"]
    return compose([*base, *overrides])


def arm(rng, shift=0.0, slope_=0.0, noise=0.001, norm=1.0, order="o", loss_at_end=3.3):
    steps = np.arange(1, STEPS + 1)
    loss = loss_at_end + 5 * np.exp(-steps / 20) + shift + slope_ * steps / STEPS + noise * rng.standard_normal(STEPS)
    rows = []
    for step, value in zip(steps, loss, strict=True):
        row = {"step": int(step), "train/tokens": int(step) * 100, "train/loss": float(value), "train/grad_norm": norm}
        if step % 20 == 0:
            row["val/loss"] = float(value)
        rows.append(row)
    return Arm(rows, {"order_hash": order, "init_hash": "i"})


def seeds(rng, candidate, twin=None, count=3, **more):
    return [
        {
            "bf16": arm(rng, **more),
            "twin": arm(rng, **{**more, **(twin or {})}),
            "candidate": arm(rng, **{**more, **candidate}),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "candidate, twin, status, gate",
    [
        ({}, {}, "PASS", "mean gap"),
        ({"shift": 0.004}, {}, "PASS", "mean gap"),
        ({"shift": 0.012}, {}, "FAIL", "G2 endpoint"),
        ({"slope_": 0.02}, {}, "FAIL", "G2 endpoint"),
        ({"shift": -0.02}, {}, "SUSPECT", "leak"),
        ({"norm": 1.2}, {}, "FAIL", "G1 health"),
        ({}, {"shift": 0.006}, "INCONCLUSIVE", "G4 assay"),
    ],
)
def test_verdicts_of_known_candidates(rng, candidate, twin, status, gate):
    verdict = judge(config(), seeds(rng, candidate, twin))
    assert verdict.status == status and gate in verdict.reason, verdict.reason


def test_delta_is_a_quarter_percent_of_the_loss_and_never_above_a_hundredth(rng):
    assert math.isclose(judge(config(), seeds(rng, {})).details["delta"], 0.0025 * 3.3, rel_tol=0.01)
    assert judge(config(), seeds(rng, {}, loss_at_end=9.0)).details["delta"] == 0.010
    assert judge(config("accept.delta=0.5"), seeds(rng, {"shift": 0.1})).status == "PASS"


def test_for_a_small_model_delta_comes_from_the_twin_noise_and_says_so(rng):
    noisy = seeds(rng, {}, noise=0.02)
    verdict = judge(config(model="llama_tiny"), noisy)
    assert verdict.details["delta"] > 0.010 and "twins" in verdict.details["delta_from"]
    assert judge(config(), noisy).details["delta"] <= 0.010  # a large one does not loosen its own bound


def test_a_gap_that_grows_fails_before_it_reaches_the_endpoint_bound(rng):
    made = seeds(rng, {})
    for s in made:
        rows = [dict(r) for r in s["candidate"].rows]
        for r in rows:
            late = max(0, r["step"] - STEPS // 2) / (STEPS // 2)
            r["train/loss"] += 0.03 * late
        s["candidate"] = replace(s["candidate"], rows=rows)
    verdict = judge(config(), made)
    assert verdict.status == "FAIL" and "G3 shape" in verdict.reason


def test_nan_and_missing_steps_fail(rng):
    for damage in ("nan", "short"):
        made = seeds(rng, {})
        rows = [dict(r) for r in made[1]["candidate"].rows]
        rows[50]["train/loss"] = math.nan
        made[1]["candidate"] = replace(made[1]["candidate"], rows=rows if damage == "nan" else rows[:40])
        assert judge(config(), made).status == "FAIL"


@pytest.mark.parametrize("name, rows", [("twin", slice(40)), ("candidate", slice(STEPS)), ("bf16", slice(40))])
def test_arms_of_other_steps_are_void(rng, name, rows):
    """A short twin made the noise, and with it delta, as large as the fall of the loss: everything passed.
    https://github.com/NVIDIA/Megatron-LM/pull/5069 is a comparison of curves of different length."""
    made = seeds(rng, {})
    changed = [dict(row) for row in made[1][name].rows[rows]]
    changed[-1].pop("val/loss")
    made[1][name] = replace(made[1][name], rows=changed)
    verdict = judge(config(), made)
    assert verdict.status == "FAIL" and "void" in verdict.reason and "other steps" in verdict.reason


@pytest.mark.parametrize("key, value", [("train/loss", math.nan), ("val/loss", math.inf), ("train/grad_norm", 0.0)])
@pytest.mark.parametrize("name", ["bf16", "twin"])
def test_a_reference_that_is_not_finite_is_void(rng, name, key, value):
    """Comparisons with NaN are false, so it passed: https://github.com/karpathy/autoresearch/pull/84"""
    made = seeds(rng, {})
    rows = [dict(row) for row in made[0][name].rows]
    rows[59][key] = value
    made[0][name] = replace(made[0][name], rows=rows)
    verdict = judge(config(), made)
    assert verdict.status == "FAIL" and f"void: seed 0: {name}" in verdict.reason


def test_arms_with_another_data_order_are_void(rng):
    made = seeds(rng, {"order": "other"})
    verdict = judge(config(), made)
    assert verdict.status == "FAIL" and "void" in verdict.reason and "data order" in verdict.reason


def test_a_saboteur_that_passes_means_that_the_gates_are_broken(rng):
    made = [{**s, "saboteur": arm(rng, shift=shift)} for s, shift in zip(seeds(rng, {}), (0.05,) * 3, strict=True)]
    assert judge(config(), made, "no_document_mask").status == "PASS"
    made = [{**s, "saboteur": arm(rng)} for s in seeds(rng, {})]
    verdict = judge(config(), made, "no_document_mask")
    assert verdict.status == "FAIL" and "too weak" in verdict.reason


def test_arms_on_another_text_are_void(rng):
    """The same documents by number and length, with other tokens in them; arms of a version without the hash are compared."""
    found = seeds(rng, {})
    for hashes, passes in (({}, True), ({"bf16": "t"}, True), ({"bf16": "t", "twin": "t", "candidate": "u"}, False)):
        for name, arm in found[1].items():
            arm.environment.update({"token_hash": hashes[name]} if name in hashes else {})
        verdict = judge(config(), found)
        assert (verdict.status == "PASS") == passes and ("seed 1: candidate has another text" in verdict.reason) != passes


def test_arms_differ_only_in_the_toggled_groups_and_share_seeds():
    arms = arms_of(config(), 2)
    assert {a.data.seed for a in arms.values()} == {1236} and {a.run.seed for a in arms.values()} == {1236}
    assert arms["bf16"].precision.name == "bf16" and arms["candidate"].precision.name == "fp8_current"
    assert arms["twin"].schedule.micro_rows != arms["bf16"].schedule.micro_rows
    with pytest.raises(ConfigError, match="is that"):
        arms_of(config("precision=bf16"), 0)
    with pytest.raises(ConfigError, match="no spread"):
        accept(config("accept.seeds=1"), "unused")


def test_the_bf16_arms_of_a_fast_candidate_can_run():
    cfg = compose(["recipe=llama_tiny", "precision.forward_accumulation=fast"], for_run=False)
    arms = arms_of(cfg, 0)
    assert arms["candidate"].precision.forward_accumulation == "fast"
    for name in ("bf16", "twin"):
        validate(arms[name], for_run=False)


def test_acceptance_runs_every_arm_and_continues_where_it_stopped(rng, tmp_path):
    ran = []

    def run_arm(cfg, run_dir):
        ran.append(run_dir.relative_to(tmp_path).as_posix())
        run_dir.mkdir(parents=True)
        made = arm(rng)
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made.rows))
        (run_dir / "env.json").write_text(json.dumps(made.environment))
        verdict = Verdict("PASS")
        verdict.save(run_dir)
        return verdict

    assert accept(config("accept.seeds=2"), tmp_path, run_arm).status == "PASS"
    assert ran == [f"seed{i}/{name}" for i in range(2) for name in ("bf16", "twin", "candidate")]
    assert (tmp_path / "accept.png").stat().st_size > 0 and Verdict.load(tmp_path).details["seeds"] == 2
    ran.clear()
    assert accept(config("accept.seeds=3"), tmp_path, run_arm).status == "PASS"
    assert ran == [f"seed2/{name}" for name in ("bf16", "twin", "candidate")]


@pytest.mark.parametrize("ended, goes_on", [
    (Verdict("FAIL", "checkpoint of step 5 could not be written", {"error": "CheckpointError"}), True),
    (Verdict("FAIL", "crashed: RuntimeError: out of memory"), True),
    (Verdict("INCONCLUSIVE", "interrupted after step 5"), True),
    (Verdict("FAIL", "the loss of step 5 is nan", {"error": "TrainingError"}), False),
    (Verdict("FAIL", "learned: final loss 4.4 is not below 3.3", {"gates": []}), False),
], ids=["full disk", "crash", "signal", "not finite", "learned nothing"])  # fmt: skip
@pytest.mark.parametrize("broken", ["bf16", "candidate"])
def test_what_ended_an_arm_decides_whether_it_goes_on(rng, tmp_path, ended, goes_on, broken):
    """A full disk is no verdict on FP8: half of an arm is not judged, and a failed reference does not count the second time."""
    ran = []

    def run_arm(cfg, run_dir):
        ran.append((run_dir.name, cfg.run.resume))
        run_dir.mkdir(parents=True, exist_ok=True)
        first = len(ran) == ("bf16", "twin", "candidate").index(broken) + 1
        made, verdict = arm(rng), ended if first else Verdict("PASS")
        (run_dir / "config.resolved.yaml").write_text(to_yaml(cfg))
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made.rows))
        (run_dir / "env.json").write_text(json.dumps(made.environment))
        verdict.save(run_dir)
        return verdict

    first = accept(config("accept.seeds=2"), tmp_path, run_arm)
    count = len(ran)
    second = accept(config("accept.seeds=2"), tmp_path, run_arm)
    if goes_on:
        assert first.status == "INCONCLUSIVE" and "start the same acceptance again" in first.reason
        assert second.status == "PASS" and ran[count] == (broken, True)
    elif broken == "bf16":
        assert len(ran) == count
        assert all("void: the reference arm bf16 of seed 0" in verdict.reason for verdict in (first, second))
    else:
        assert len(ran) == count, "the candidate's failure is judged by the gates, from its rows"


@pytest.mark.parametrize("name", ["verdict.json", "env.json"])
def test_a_damaged_file_of_a_finished_arm_is_named(rng, tmp_path, name):
    """After a loss of power: https://github.com/dbolya/yolact/issues/710"""

    def run_arm(cfg, run_dir):
        run_dir.mkdir(parents=True)
        made = arm(rng)
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made.rows))
        (run_dir / "env.json").write_text(json.dumps(made.environment))
        Verdict("PASS").save(run_dir)
        return Verdict("PASS")

    accept(config("accept.seeds=2"), tmp_path, run_arm)
    (tmp_path / "seed1" / "twin" / name).write_text("")
    with pytest.raises(ConfigError, match=f"seed1/twin/{name} is damaged"):
        accept(config("accept.seeds=2"), tmp_path, run_arm)


@pytest.mark.parametrize(
    "probability, df, value",
    [
        (0.95, 1, 6.313752),
        (0.95, 2, 2.919986),
        (0.95, 4, 2.131847),
        (0.975, 10, 2.228139),
        (0.995, 30, 2.749996),
        (0.5, 3, 0.0),
    ],
)
def test_student_t_quantiles_equal_the_printed_tables(probability, df, value):
    assert abs(t_quantile(probability, df) - value) < 1e-6 and abs(t_cdf(value, df) - probability) < 1e-6


def test_paired_bounds_slopes_and_spikes():
    bound = paired_mean([1.0, 2.0, 3.0])
    assert bound.mean == 2.0 and bound.deviation == 1.0 and abs(bound.upper - (2 + 2.919986 / math.sqrt(3))) < 1e-6
    with pytest.raises(ValueError, match="at least two"):
        paired_mean([1.0])
    assert slope([1.0, 3.0, 5.0]) == 2.0 and slope([1.0]) == 0.0
    losses = [3.0] * 50
    losses[30] = 4.0
    assert spikes(losses) == 1


def test_the_bound_covers_the_true_mean_as_often_as_it_says(rng):
    misses = sum(paired_mean(list(rng.normal(0.0, 1.0, 3))).upper < 0 for _ in range(4000))
    assert 0.04 < misses / 4000 < 0.06


def test_an_arm_of_other_settings_does_not_stand_for_this_one(tmp_path):
    """In Python the folder is the caller's: finished arms of another candidate lie where this one's would."""
    cfg = config("accept.seeds=2", "precision=fp8_block")
    other = arms_of(config("accept.seeds=2", "precision=fp8_current"), 0)
    for name in ("bf16", "twin", "candidate"):
        folder = tmp_path / "seed0" / name
        folder.mkdir(parents=True)
        (folder / "config.resolved.yaml").write_text(to_yaml(other[name]))
        Verdict("PASS", "").save(folder)
    with pytest.raises(ConfigError, match="seed0/candidate holds an arm with another precision.name"):
        accept(cfg, tmp_path, run_arm=lambda *_: pytest.fail("no arm should start"))


@pytest.mark.parametrize("override, message", [("data.val_fraction=0", "hold some documents out"),
                                               ("schedule.stop_after_steps=2", "within schedule.warmup_tokens")])
def test_what_leaves_nothing_to_compare_is_refused_before_the_first_arm(tmp_path, override, message):
    cfg = config("check.mode=off", "schedule.warmup_tokens=4096", override)
    with pytest.raises(ConfigError, match=message):
        accept(cfg, tmp_path, run_arm=lambda *_: pytest.fail("no arm should start"))
