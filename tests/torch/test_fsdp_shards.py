"""FSDP2 over ranks that own uneven or empty shards of an FP8 model equals the whole model."""

import pytest
import torch

from te_plugin.torch import quantize
from tests.torch.fsdp_shards import model, sharded, train
from tests.training.launch import run_ranks


@pytest.mark.report("pytorch/ao#3983")
def test_uneven_and_empty_shards_train_as_the_whole_model_does():
    results = run_ranks(3, sharded, "fp8_current")
    whole = model("fp8_current")
    losses = train(whole)
    assert [rows[1][0] for _, rows, _ in results] == [2, 2, 0]
    assert [rows[0][0] for _, rows, _ in results] == [11, 11, 10]
    for rank_losses, _, parameters in results:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        for got, want in zip(parameters, whole.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), want.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.report("pytorch/ao#3983")
def test_the_amax_of_an_empty_shard_is_zero():
    made = quantize(torch.zeros(0, 32))
    assert made.amax == 0 and made.scale_inv.item() == 1
