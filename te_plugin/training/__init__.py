"""Training: loop, optimizer, checkpoints, metrics and tracking of a run.

`metrics`, `tracking` and `progress` import no framework, so any adapter can write the same run directory.
"""

from te_plugin.training.metrics import MetricsFile, read_metrics
from te_plugin.training.tracking import Tracker

__all__ = ["MetricsFile", "Tracker", "read_metrics"]
