"""What really ran in torch: every launch is counted by its plan."""

from te_plugin.launches import Launches

_launches = Launches("torch", counted="launches")
record, reset, snapshot = _launches.record, _launches.reset, _launches.snapshot
