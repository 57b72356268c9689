"""MaxText's own mixture of experts with our grouped GEMM against its ragged_dot."""

import jax
import numpy as np
import pytest
from small import batches, config, losses

from te_plugin.jax import launches


def ops_traced() -> set[str]:
    return {row["op"] for row in launches.snapshot()}


def test_the_losses_of_a_mixture_equal_those_with_ragged_dot():
    cfg = config("precision=fp32", "moe=tiny", "moe.aux_loss_coeff=0", "moe.ffn_hidden_size=128")
    rows = batches(cfg, 2, 4)
    launches.reset()
    ours = losses(cfg, rows, jax.devices()[:1])
    assert "grouped_gemm" in ops_traced()
    launches.reset()
    theirs = losses(cfg, rows, jax.devices()[:1], quantization="", megablox=False)
    assert "grouped_gemm" not in ops_traced()
    print("grouped GEMM", ours, "ragged_dot", theirs)
    assert abs(ours[0] - np.log(cfg.model.vocab_size)) < 0.1, "a new model guesses uniformly"
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp8_rowwise", "fp8_block"])
def test_fp8_experts_follow_those_in_fp32(precision):
    settings = ("moe=tiny", "moe.aux_loss_coeff=0", "moe.ffn_hidden_size=128", "model.head_dim=64")
    exact = config("precision=fp32", *settings)
    rows = batches(exact, 2, 4)
    want = losses(exact, rows, jax.devices()[:1])
    launches.reset()
    got = losses(config(f"precision={precision}", *settings), rows, jax.devices()[:1])
    traced = {row["problem"] for row in launches.snapshot() if row["op"] == "grouped_gemm"}
    assert any(f"precision='{precision}'" in problem and "stage='wgrad'" in problem for problem in traced), traced
    assert got != want, "FP8 rounds"
    np.testing.assert_allclose(got, want, rtol=2e-2)
