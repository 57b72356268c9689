"""MaxText's own mixture of experts with our grouped GEMM against its ragged_dot."""

import jax
import numpy as np
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
