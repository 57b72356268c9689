"""What really runs: kernels are counted where JAX traces them, so that a run can say which it used and why.

One trace may run many times (a jitted step, a scan over layers), so the numbers are places in the program, not calls.
"""

from __future__ import annotations

from te_plugin.plan import Plan

_counts: dict[int, list] = {}


def record(plan: Plan, stage: str) -> None:
    """Count one traced launch. Plans are cached objects, so their identity is their key."""
    _, stages = _counts.setdefault(id(plan), [plan, {}])
    stages[stage] = stages.get(stage, 0) + 1


def reset() -> None:
    _counts.clear()


def snapshot() -> list[dict]:
    """One row a plan, with the keys of te_plugin.torch.launches; `traced` stands for `launches`."""
    return [
        {
            "op": plan.problem.op,
            "kernel": plan.kernel.name,
            "arch": plan.target.arch,
            "framework": "jax",
            "problem": str(plan.problem),
            "note": plan.note,
            "fallback": plan.is_fallback,
            "scratch_bytes": plan.scratch_bytes,
            "rejected": [list(pair) for pair in plan.rejected],
            "traced": dict(stages),
        }
        for plan, stages in _counts.values()
    ]
