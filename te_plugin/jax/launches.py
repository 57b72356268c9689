"""What really runs in JAX: kernels are counted where JAX traces them.

One trace may run many times (a jitted step, a scan over layers), so the numbers are places in the program, not calls.
"""

from te_plugin.launches import Launches

_launches = Launches("jax", counted="traced")
record, reset, snapshot = _launches.record, _launches.reset, _launches.snapshot
