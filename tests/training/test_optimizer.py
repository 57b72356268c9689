"""FP32 master weights and gradient sums, one clipping norm, decay on matrices only."""

import math

import pytest
import torch
from torch import nn

from te_plugin.training.distributed import World
from te_plugin.training.optimizer import MasterAdamW, learning_rate

ALONE = World(torch.device("cpu"))
ADAM = dict(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_grad=1.0)


class OneWeight(nn.Module):
    """y = w * x, so that the gradient is x."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, 1, dtype=dtype))

    def backward(self, gradient):
        (self.w * torch.tensor(gradient, dtype=self.w.dtype)).sum().backward()


@pytest.mark.report("ISEEKYAN/Megatron-LM#146")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_256_and_1_of_two_microbatches_sum_to_257(dtype):
    model = OneWeight(dtype)
    optimizer = MasterAdamW(model, ALONE, **ADAM)
    optimizer.zero_grad()
    model.backward(256.0)
    model.backward(1.0)
    assert model.w.main_grad.dtype == torch.float32 and model.w.main_grad.item() == 257.0
    assert model.w.grad is None and optimizer.gradient_norm() == 257.0


@pytest.mark.report("AMD-AGI/Primus#1046")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 32])
def test_every_microbatch_reaches_main_grad_exactly_once(microbatches, fused):
    model = OneWeight(torch.bfloat16)
    optimizer = MasterAdamW(model, ALONE, **ADAM)
    for _ in range(2):  # the second step must not see the first one's sum
        optimizer.zero_grad()
        for _ in range(microbatches):
            if fused:  # what a fused weight-gradient GEMM does
                model.w.main_grad.add_(1.0)
                model.w.grad_added_to_main_grad = True
            model.backward(1.0)
        assert model.w.main_grad.item() == float(microbatches)


def test_masters_keep_updates_that_bf16_weights_cannot_show():
    model = OneWeight(torch.bfloat16)
    optimizer = MasterAdamW(model, ALONE, **{**ADAM, "weight_decay": 0.0})
    for _ in range(40):
        optimizer.zero_grad()
        model.backward(1.0)
        optimizer.step(1e-4, optimizer.gradient_norm())  # 1 - 1e-4 rounds to 1 in BF16
    assert abs(optimizer.weights[0].master.item() - (1 - 40e-4)) < 1e-5
    assert model.w.item() == torch.tensor(1 - 40e-4).bfloat16().item() < 1


def test_updates_equal_torch_adamw_with_clipping_and_decay_on_matrices_only():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    theirs = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    theirs.load_state_dict(ours.state_dict())
    optimizer = MasterAdamW(ours, ALONE, **{**ADAM, "clip_grad": 0.5})
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for _ in range(5):
        x = torch.randn(11, 7) * 3
        optimizer.zero_grad()
        ours(x).square().sum().backward()
        norm = optimizer.gradient_norm()
        optimizer.step(1e-2, norm)
        adam.zero_grad()
        theirs(x).square().sum().backward()
        assert abs(norm / float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)) - 1) < 1e-6
        adam.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_a_step_did_not_use_keeps_a_zero_gradient():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    optimizer = MasterAdamW(model, ALONE, **{**ADAM, "weight_decay": 0.0})
    idle = model["idle"].weight.detach().clone()
    optimizer.zero_grad()
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step(0.1, optimizer.gradient_norm())
    assert torch.equal(model["idle"].weight, idle) and model["idle"].weight.main_grad.abs().max() == 0


def test_learning_rate_warms_up_in_tokens_and_ends_at_the_minimum():
    rate = lambda tokens: learning_rate(tokens, peak=1.0, total_tokens=1000, warmup_tokens=100, min_ratio=0.1)  # noqa: E731
    assert rate(10) == 0.1 and rate(50) == 0.5 and rate(100) == 1.0
    assert math.isclose(rate(550), 0.55) and math.isclose(rate(1000), 0.1) and math.isclose(rate(2000), 0.1)
    assert learning_rate(1, peak=2.0, total_tokens=10, warmup_tokens=0, min_ratio=1.0) == 2.0
