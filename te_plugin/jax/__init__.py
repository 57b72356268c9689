"""te_plugin for JAX: functions on the same compiled kernels, problems and plans as te_plugin.torch."""

from te_plugin.jax.functional import *  # noqa: F403
from te_plugin.jax.functional import __all__  # noqa: F401
