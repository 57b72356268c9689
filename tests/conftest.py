"""Shared by all tests: seeded random numbers, hypothesis profiles, threads.

Hypothesis: the normal run takes a few fixed examples; `--hypothesis-profile=thorough` takes 2,000 random ones.
"""

import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "normal",
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("normal")


@pytest.fixture
def rng(request):
    """A generator whose seed is the test's own name: fresh per test, the same on every run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
