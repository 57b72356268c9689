"""Skips the GPU tests of this folder with a reason where there is no Hopper GPU or no library."""

from pathlib import Path

import pytest

from te_plugin import ffi

from . import gpu


def pytest_collection_modifyitems(items):
    reason = gpu.reason_to_skip() or (None if ffi.is_built("sm90") else "the sm90 library is not built (make sm90)")
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("gpu") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))
