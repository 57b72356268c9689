"""Shared by all tests: seeded random numbers, hypothesis profiles, threads.

Hypothesis: the normal run takes a few fixed examples; `--hypothesis-profile=thorough` takes 2,000 random ones.
"""

import importlib.util
import os
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Tests of torch and of JAX, and the processes of `-n`, share a GPU: JAX would take three quarters of its memory for each.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

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


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped, with the reason, where torch sees no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multigpu")]
    if marked and not _sees_a_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _sees_a_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def rng(request):
    """A generator whose seed is the test's own name: fresh per test, the same on every run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
