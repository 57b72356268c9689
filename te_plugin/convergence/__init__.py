"""Does a run converge as it should: golden curves, comparisons of two runs, verdicts and pictures. Imports no framework."""

from te_plugin.convergence.compare import compare_runs
from te_plugin.convergence.golden import Golden, GoldenError
from te_plugin.convergence.verdict import Verdict

__all__ = ["Golden", "GoldenError", "Verdict", "compare_runs"]
