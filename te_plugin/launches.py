"""Which kernels a process ran and why: launches counted by their plans."""

from __future__ import annotations

from te_plugin.plan import Plan


class Launches:
    """The counts of one framework. counted: what one of them is, the key of its numbers in `snapshot`."""

    def __init__(self, framework: str, counted: str):
        self._framework, self._counted = framework, counted
        self._counts: dict[int, tuple[Plan, dict[str, int]]] = {}

    def record(self, plan: Plan, stage: str) -> None:
        """Count one. Plans are cached objects, so their identity is their key."""
        entry = self._counts.get(id(plan))
        if entry is None:
            entry = self._counts[id(plan)] = (plan, {})
        stages = entry[1]
        stages[stage] = stages.get(stage, 0) + 1

    def reset(self) -> None:
        self._counts.clear()

    def snapshot(self) -> list[dict]:
        """One row a plan: op, kernel, problem, note, rejected kernels with reasons, and the counts of each stage."""
        return [
            {
                "op": plan.problem.op,
                "kernel": plan.kernel.name,
                "arch": plan.target.arch,
                "framework": self._framework,
                "problem": str(plan.problem),
                "note": plan.note,
                "fallback": plan.is_fallback,
                "scratch_bytes": plan.scratch_bytes,
                "rejected": [list(pair) for pair in plan.rejected],
                self._counted: dict(stages),
            }
            for plan, stages in self._counts.values()
        ]
