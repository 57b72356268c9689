"""Paired acceptance: is a candidate (FP8, or another toggle) as good as BF16, by measurement?

For every seed three or four runs from the same weights on the same tokens: `bf16`, `twin` (BF16 with another legal order of
summation: the noise floor), `candidate`, and on request a `saboteur` that must not pass. Losses are compared on held-out rows,
all evaluated in BF16, as the mean of the last three evaluations. n is the number of seeds, never of steps.

  G0 contract  arms differ only in the toggled groups; data order, initial weights and steps are equal       void
  G1 health    finite; median gradient-norm ratio in [0.9, 1.1] after warm-up; at most 2 more loss spikes    FAIL
  G2 endpoint  upper one-sided 95 % t bound of the mean gap below delta                                      FAIL
  G3 shape     training gap of every tenth of the run at most 2 delta, and not growing over the last half    FAIL
  G4 assay     absolute mean twin gap below delta / 2                                                        INCONCLUSIVE
  G5 too good  upper bound below -delta / 2                                                                  SUSPECT
  G6 saboteur  the saboteur must not pass G1, G2, G3 and G5                                                  FAIL
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from te_plugin.config import Config, ConfigError, differences, load
from te_plugin.config.sizes import parameter_count
from te_plugin.convergence.compare import differing_hashes
from te_plugin.convergence.statistics import median as median_of
from te_plugin.convergence.statistics import paired_mean, slope, spikes
from te_plugin.convergence.verdict import VERDICT_FILE, Verdict, read_json

RELATIVE_DELTA, LARGEST_DELTA = 0.0025, 0.010  # of the BF16 loss; nats
NOISE_FACTOR = 4.0  # for a small model, delta is at least this many times the twins' root mean square gap
SMALL_MODEL = 100_000_000  # parameters; such a model is noisier than the standard delta wherever it runs
BLOCKS = 10
TOGGLED = ("precision.", "attention.", "schedule.micro_rows", "run.fallback", "testing.", "run.dir", "track.", "check.")
_OF_ONE_START = ("run.dir", "run.resume", "track.", "accept.")  # may differ when an acceptance is continued

RunArm = Callable[[Config, Path], Verdict]


@dataclass(frozen=True)
class Arm:
    """The rows of one run. held_out: mean of its last three evaluations."""

    rows: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any]

    @property
    def losses(self) -> list[float]:
        return [row["train/loss"] for row in self.rows]

    @property
    def held_out(self) -> float:
        values = [row["val/loss"] for row in self.rows if "val/loss" in row][-3:]
        if not values:
            raise ConfigError(
                "acceptance compares held-out losses and the run made no evaluation; set schedule.eval_interval"
            )
        return sum(values) / len(values)

    @classmethod
    def read(cls, run_dir: Path) -> Arm:
        from te_plugin.training.metrics import CURVE, read_metrics

        return cls(read_metrics(run_dir, CURVE), read_json(run_dir / "env.json"))


@dataclass(frozen=True)
class Gate:
    name: str
    passed: bool
    message: str
    numbers: Mapping[str, Any]


def arms_of(cfg: Config, seed_index: int, saboteur: str | None = None) -> dict[str, Config]:
    """The configurations of one seed's runs. ConfigError when the candidate is the reference itself."""
    base = replace(
        cfg,
        data=replace(cfg.data, seed=cfg.data.seed + seed_index),
        run=replace(cfg.run, seed=cfg.run.seed + seed_index, dir=None, resume=False),
        check=replace(cfg.check, mode="off", reason=None),
    )
    plain = replace(base.attention, precision="bf16", dq_accumulation="fp32")
    bf16 = replace(base.precision, name="bf16", forward_accumulation="fp32")
    reference = replace(base, precision=bf16, attention=plain)
    if not differences(base, reference):
        raise ConfigError(
            "accept compares a candidate with precision=bf16, and this configuration is that; set precision=... "
        )
    arms = {"bf16": reference, "twin": _twin(reference), "candidate": base}
    if saboteur is not None:
        arms["saboteur"] = replace(base, testing=replace(base.testing, sabotage=saboteur))
    return arms


def require_comparable(cfg: Config) -> None:
    """ConfigError when the configuration is the reference itself, or leaves nothing to compare, or one pair alone to decide."""
    arms_of(cfg, 0)
    schedule = cfg.schedule
    step_tokens = schedule.global_rows * cfg.data.seq_len
    steps = min(schedule.tokens // step_tokens, schedule.stop_after_steps or math.inf)
    if cfg.data.val_fraction == 0:
        raise ConfigError("data.val_fraction=0: acceptance compares held-out losses; hold some documents out")
    if steps * step_tokens <= schedule.warmup_tokens:
        raise ConfigError(
            f"the run ends after {steps} steps, within schedule.warmup_tokens={schedule.warmup_tokens}: gradient norms are "
            f"compared after the warm-up; shorten it, or train longer"
        )
    if cfg.accept.seeds < 2:
        raise ConfigError(
            f"accept.seeds={cfg.accept.seeds}: one pair has no spread; use at least 2, and 3 to be useful"
        )


def accept(cfg: Config, out_dir: Path | str, run_arm: RunArm | None = None, saboteur: str | None = None) -> Verdict:
    """Run every arm that is not finished yet, judge, write OUT/verdict.json and accept.png."""
    out_dir = Path(out_dir)
    require_comparable(cfg)
    run_arm = run_arm or _run_here
    from te_plugin.training.progress import say

    for index in range(cfg.accept.seeds):
        for name, arm in arms_of(cfg, index, saboteur).items():
            _require_same_arm(out_dir / f"seed{index}" / name, arm)
    seeds: list[dict[str, Arm]] = []
    for index in range(cfg.accept.seeds):
        found = {}
        for name, arm in arms_of(cfg, index, saboteur).items():
            run_dir = out_dir / f"seed{index}" / name
            verdict = Verdict.load(run_dir) if (run_dir / VERDICT_FILE).exists() else None
            if verdict is None or _broken_off(verdict):
                say(f"acceptance: seed {index}, {name}")
                started = (run_dir / "config.resolved.yaml").exists()  # an arm continues where an earlier attempt stopped
                verdict = run_arm(replace(arm, run=replace(arm.run, resume=started, dir=str(run_dir))), run_dir)
            if _broken_off(verdict):
                reason = f"seed {index}, {name}: {verdict.reason}; start the same acceptance again to continue"
                return _save(Verdict("INCONCLUSIVE", reason), out_dir)
            if verdict.status == "FAIL" and name in ("bf16", "twin"):
                reason = f"void: the reference arm {name} of seed {index} failed: {verdict.reason}"
                return _save(Verdict("FAIL", reason), out_dir)
            found[name] = Arm.read(run_dir)
        seeds.append(found)
    verdict = judge(cfg, seeds, saboteur)
    from te_plugin.convergence.pictures import draw_acceptance

    draw_acceptance(
        [{name: arm.rows for name, arm in s.items()} for s in seeds], verdict.details["delta"], out_dir / "accept.png"
    )
    return _save(verdict, out_dir)


def judge(cfg: Config, seeds: Sequence[Mapping[str, Arm]], saboteur: str | None = None) -> Verdict:
    """The verdict over finished arms; reads nothing but them."""
    problem = _contract_problem(cfg, seeds, saboteur)
    if problem:
        return Verdict("FAIL", f"void: {problem}", {"delta": None})
    twin_gaps = [s["twin"].held_out - s["bf16"].held_out for s in seeds]
    bf16_loss = sum(s["bf16"].held_out for s in seeds) / len(seeds)
    delta, why = _delta(cfg, bf16_loss, twin_gaps)
    gates = _candidate_gates(cfg, seeds, "candidate", delta)
    twin_mean = sum(twin_gaps) / len(twin_gaps)
    assay = Gate(
        "G4 assay",
        abs(twin_mean) < delta / 2,
        f"mean twin gap {twin_mean:+.5f}, limit {delta / 2:.5f}",
        {"gaps": twin_gaps},
    )
    details: dict[str, Any] = {"delta": delta, "delta_from": why, "bf16_loss": bf16_loss, "seeds": len(seeds)}
    all_gates = [*gates, assay]
    if saboteur is not None:
        broken = _candidate_gates(cfg, seeds, "saboteur", delta)
        caught = [g.name for g in broken if not g.passed]
        said = (
            f"{saboteur} was caught by {', '.join(caught)}"
            if caught
            else f"{saboteur} passed every gate: the gates are too weak"
        )
        all_gates.append(Gate("G6 saboteur", bool(caught), said, {"gates": [asdict(g) for g in broken]}))
    details["gates"] = [asdict(g) for g in all_gates]
    return _combine(all_gates, details)


def _combine(gates: Sequence[Gate], details: Mapping[str, Any]) -> Verdict:
    failed = {g.name: g for g in gates if not g.passed}
    for name in ("G6 saboteur", "G1 health"):
        if name in failed:
            return Verdict("FAIL", f"{name}: {failed[name].message}", details)
    if "G4 assay" in failed:
        return Verdict(
            "INCONCLUSIVE", f"G4 assay: {failed['G4 assay'].message}: the noise is too large to decide", details
        )
    hard = [g for name, g in failed.items() if name != "G5 too good"]
    if hard:
        return Verdict("FAIL", "; ".join(f"{g.name}: {g.message}" for g in hard), details)
    if failed:
        return Verdict(
            "SUSPECT", f"G5 too good: {failed['G5 too good'].message}: look for a leak across documents", details
        )
    return Verdict("PASS", next(g.message for g in gates if g.name == "G2 endpoint"), details)


def _candidate_gates(cfg: Config, seeds: Sequence[Mapping[str, Arm]], name: str, delta: float) -> list[Gate]:
    pairs = [(s["bf16"], s[name]) for s in seeds]
    health = _health(cfg, pairs)
    if not health.passed and health.numbers.get("non_finite"):
        return [health]
    bound = paired_mean([b.held_out - a.held_out for a, b in pairs])
    said = f"mean gap {bound.mean:+.5f} nats, 95 % upper bound {bound.upper:+.5f}"
    return [
        health,
        Gate("G2 endpoint", bound.upper < delta, f"{said}, delta {delta:.5f}", asdict(bound)),
        _shape(pairs, delta),
        Gate("G5 too good", bound.upper >= -delta / 2, f"{said}, limit {-delta / 2:.5f}", {}),
    ]


def _health(cfg: Config, pairs: Sequence[tuple[Arm, Arm]]) -> Gate:
    ratios, extra, bad = [], [], 0
    for a, b in pairs:
        rows = [(x, y) for x, y in zip(a.rows, b.rows, strict=False) if x["train/tokens"] > cfg.schedule.warmup_tokens]
        bad += sum(not math.isfinite(y["train/loss"] + y["train/grad_norm"]) for y in b.rows) + (
            len(b.rows) < len(a.rows)
        )
        if not bad:
            ratios.append(median_of([y["train/grad_norm"] / x["train/grad_norm"] for x, y in rows]))
            extra.append(spikes(b.losses) - spikes(a.losses))
    numbers = {"grad_norm_ratio": ratios, "extra_spikes": extra, "non_finite": bad}
    if bad:
        return Gate("G1 health", False, f"{bad} steps are not finite or missing", numbers)
    passed = all(0.9 <= r <= 1.1 for r in ratios) and all(e <= 2 for e in extra)
    return Gate(
        "G1 health", passed, f"gradient-norm ratios {[round(r, 3) for r in ratios]}, extra spikes {extra}", numbers
    )


def _shape(pairs: Sequence[tuple[Arm, Arm]], delta: float) -> Gate:
    """Training gaps, averaged over seeds, in ten blocks of the run."""
    length = min(len(a.rows) for a, _ in pairs)
    gap = [sum(b.losses[i] - a.losses[i] for a, b in pairs) / len(pairs) for i in range(length)]
    edges = [round(k * length / BLOCKS) for k in range(BLOCKS + 1)]
    blocks = [sum(gap[p:q]) / (q - p) for p, q in zip(edges, edges[1:], strict=False) if q > p]
    last_half = blocks[len(blocks) // 2 :]
    growth = slope(last_half) * (len(last_half) - 1)
    worst = max(blocks)
    passed = worst <= 2 * delta and growth < delta
    message = (
        f"largest block gap {worst:+.5f} of {2 * delta:.5f}, growth over the last half {growth:+.5f} of {delta:.5f}"
    )
    return Gate("G3 shape", passed, message, {"blocks": blocks, "growth": growth})


def _delta(cfg: Config, bf16_loss: float, twin_gaps: Sequence[float]) -> tuple[float, str]:
    if cfg.accept.delta is not None:
        return cfg.accept.delta, "accept.delta"
    standard = min(RELATIVE_DELTA * bf16_loss, LARGEST_DELTA)
    noise = NOISE_FACTOR * math.sqrt(sum(g * g for g in twin_gaps) / len(twin_gaps))
    if parameter_count(cfg)[0] < SMALL_MODEL and noise > standard:
        return (
            noise,
            f"{NOISE_FACTOR:g} x the twins' root mean square gap: more than the standard {standard:.5f}",
        )
    return standard, f"{RELATIVE_DELTA:.2%} of the BF16 loss, at most {LARGEST_DELTA}"


def _contract_problem(cfg: Config, seeds: Sequence[Mapping[str, Arm]], saboteur: str | None) -> str | None:
    for index, arms in enumerate(seeds):
        configs = arms_of(cfg, index, saboteur)
        for name, arm in arms.items():
            touched = [key for key in differences(configs["bf16"], configs[name]) if not key.startswith(TOGGLED)]
            if touched:
                return f"{name} differs from bf16 in {', '.join(touched)}"
            if unpaired := differing_hashes(arm.environment, arms["bf16"].environment):
                what = {"order_hash": "data order", "token_hash": "text", "init_hash": "set of initial weights"}[unpaired[0]]
                return f"seed {index}: {name} has another {what} than bf16"
            if problem := _rows_problem(name, arm, arms["bf16"]):
                return f"seed {index}: {problem}"
    return None


def _rows_problem(name: str, arm: Arm, reference: Arm) -> str | None:
    """Gaps are paired by step: a twin of other steps would widen the noise that every other gap is measured against.

    A candidate that ended early or is not finite is no breach of contract: it fails G1.
    """
    is_reference = name in ("bf16", "twin")
    if is_reference and not all(_is_usable(row) for row in arm.rows):
        return f"{name} has a step whose loss is not finite or whose gradient norm is not above 0"
    if not is_reference and len(arm.rows) < len(reference.rows):
        return None
    steps, expected = ([(row["step"], "val/loss" in row) for row in one.rows] for one in (arm, reference))
    return None if steps == expected else f"{name} has other steps or evaluations than bf16"


def _is_usable(row: Mapping[str, Any]) -> bool:
    return math.isfinite(row["train/loss"] + row.get("val/loss", 0.0)) and 0 < row["train/grad_norm"] < math.inf


def _twin(reference: Config) -> Config:
    """BF16 with another legal order of summation: other microbatches where the step has several rows, else other kernels."""
    rows, micro = reference.schedule.global_rows, reference.schedule.micro_rows
    if micro > 1 and micro % 2 == 0:
        return replace(reference, schedule=replace(reference.schedule, micro_rows=micro // 2))
    if rows % (2 * micro) == 0 and reference.parallel.name == "single":
        return replace(reference, schedule=replace(reference.schedule, micro_rows=2 * micro))
    attention = replace(reference.attention, kernel="composite")
    return replace(reference, attention=attention, run=replace(reference.run, fallback="allow"))


def _require_same_arm(run_dir: Path, arm: Config) -> None:
    """ConfigError when the folder holds a run with other settings, whose numbers would stand for this arm's."""
    path = run_dir / "config.resolved.yaml"
    changed = [key for key in differences(load(path), arm) if not key.startswith(_OF_ONE_START)] if path.exists() else []
    if changed:
        raise ConfigError(f"{run_dir} holds an arm with another {changed[0]}; give another folder, or the same settings")


def _broken_off(verdict: Verdict) -> bool:
    """Whether a signal, a full disk or a crash ended an arm, and not its training: then it goes on before it is judged."""
    by_training = "gates" in verdict.details or verdict.details.get("error") == "TrainingError"
    return verdict.status == "INCONCLUSIVE" or (verdict.status == "FAIL" and not by_training)


def _run_here(cfg: Config, run_dir: Path) -> Verdict:
    from te_plugin.training.run import train

    return train(cfg, run_dir)


def _save(verdict: Verdict, out_dir: Path) -> Verdict:
    out_dir.mkdir(parents=True, exist_ok=True)
    verdict.save(out_dir)
    return verdict
