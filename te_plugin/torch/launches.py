"""What really ran: every launch is counted by its plan, so that a run can say which kernels it used and why."""

from __future__ import annotations

from te_plugin.plan import Plan

_counts: dict[int, list] = {}


def record(plan: Plan, stage: str) -> None:
    """Count one launch. Plans are cached objects, so their identity is their key."""
    entry = _counts.get(id(plan))
    if entry is None:
        entry = _counts[id(plan)] = [plan, {}]
    stages = entry[1]
    stages[stage] = stages.get(stage, 0) + 1


def reset() -> None:
    _counts.clear()


def snapshot() -> list[dict]:
    """One row a plan: op, kernel, problem, note, rejected kernels with reasons, and the launches of each stage."""
    return [
        {
            "op": plan.problem.op,
            "kernel": plan.kernel.name,
            "arch": plan.target.arch,
            "framework": "torch",
            "problem": str(plan.problem),
            "note": plan.note,
            "fallback": plan.is_fallback,
            "scratch_bytes": plan.scratch_bytes,
            "rejected": [list(pair) for pair in plan.rejected],
            "launches": dict(stages),
        }
        for plan, stages in _counts.values()
    ]
