"""DistributedDataParallel hands rank 0's buffers to all ranks in every forward; scales and histories are each rank's own."""

import pytest

from tests.torch.ddp_scales import steps
from tests.training.launch import run_ranks


def test_a_rank_keeps_its_scales_and_loses_no_gradient():
    results = run_ranks(2, steps, 100.0)
    for norms, errors in results:
        assert max(errors) < 0.05  # with rank 0's scale the other's values would saturate
        assert norms[1] == pytest.approx(norms[2], rel=1e-3) and norms[1] > norms[0] > 0
