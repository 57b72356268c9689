"""Which exceptions are a user's to fix: they reach the terminal as one message, without a traceback."""

from __future__ import annotations

import sys

# Looked up by name, so that a command which never touches data or training does not import them.
_BY_MODULE = {
    "te_plugin.config.schema": ("ConfigError",),
    "te_plugin.plan": ("PlanError",),
    "te_plugin.ffi": ("LibraryError",),
    "te_plugin.data.errors": ("DataError",),
    "te_plugin.convergence.golden": ("GoldenError",),
    "te_plugin.training.run_dir": ("RunDirError",),
    "te_plugin.training.checkpoint": ("CheckpointError",),
    "te_plugin.training.metrics": ("MetricsError",),
    "te_plugin.training.wandb_sink": ("TrackingError",),
}


def user_errors() -> tuple[type[Exception], ...]:
    """The exception classes of the modules that are loaded; a class of a module never loaded cannot have been raised."""
    return tuple(getattr(sys.modules[module], name) for module, names in _BY_MODULE.items() if module in sys.modules
                 for name in names)
