"""The configuration of small real runs, as a fixture."""

import pytest

from tests.training.small import small_config


@pytest.fixture
def small():
    return small_config
