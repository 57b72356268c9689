"""convert(): what it swaps, what it leaves alone and why, and that the model still computes the same."""

import pytest
import torch
from torch import nn

import te_plugin.torch as tp


class Block(nn.Module):
    def __init__(self, hidden: int = 128):
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 256)
        self.odd = nn.Linear(hidden, 100)
        self.back = nn.Linear(100, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, 384, bias=False)

    def forward(self, x):
        x = self.norm(x)
        x = x + self.up(x)[..., :x.shape[-1]] + self.back(self.odd(x))
        return self.lm_head(x)


def test_converted_model_keeps_parameters_and_names_what_it_skipped():
    torch.manual_seed(0)
    model = Block()
    names = [name for name, _ in model.named_parameters()]
    weights = dict(model.named_parameters())
    report = tp.convert(model, precision="fp8_current")
    assert [name for name, _ in model.named_parameters()] == names
    assert all(dict(model.named_parameters())[name] is weights[name] for name in names)
    assert [name for name, _ in report.converted] == ["norm", "up"]
    reasons = dict(report.skipped)
    assert "skip" in reasons["lm_head"]
    assert "out_features=100" in reasons["odd"] and "16" in reasons["odd"]
    assert "in_features=100" in reasons["back"]
    assert "odd" in str(report)


def test_bf16_conversion_computes_what_the_model_computed():
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(10, 128)
    before = model(x)
    tp.convert(model, precision="fp32", skip=())
    assert (model(x) - before).norm() / before.norm() < 1e-6
    assert isinstance(model.up, tp.Linear) and isinstance(model.norm, tp.RMSNorm)


def test_fp8_conversion_trains_close_to_the_original():
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(64, 128)
    exact = model(x)
    exact.square().mean().backward()
    reference = model.up.weight.grad.clone()
    model.zero_grad()
    tp.convert(model, precision="fp8_rowwise")
    y = model(x)
    y.square().mean().backward()
    assert 1e-4 < (y - exact).norm() / exact.norm() < 0.05, "FP8 must be visible, and small"
    assert (model.up.weight.grad - reference).norm() / reference.norm() < 0.08


def test_shared_weights_hooks_and_subclasses_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Module()
    model.embedding = nn.Embedding(128, 128)
    model.tied = nn.Linear(128, 128, bias=False)
    model.tied.weight = model.embedding.weight
    model.scaled = Scaled(128, 128)
    model.hooked = nn.Linear(128, 128)
    model.hooked.register_forward_hook(lambda *_: None)
    model.plain = nn.Linear(128, 128)
    reasons = dict(tp.convert(model, precision="fp8_current").skipped)
    assert set(reasons) == {"tied", "scaled", "hooked"}
    assert "shared" in reasons["tied"] and "Scaled" in reasons["scaled"] and "hooks" in reasons["hooked"]


def test_nothing_to_convert_is_an_error_that_lists_the_reasons():
    with pytest.raises(ValueError, match="out_features=100"):
        tp.convert(nn.Sequential(nn.Linear(128, 100)), precision="fp8_current")
    with pytest.raises(ValueError, match="fp9"):
        tp.convert(nn.Sequential(nn.Linear(128, 128)), precision="fp9")


@pytest.mark.parametrize("precision,options", [("bf16", {"weight_cache": False}), ("fp8_current", {"history_len": 4})])
def test_options_are_checked_also_where_only_norms_are_converted(precision, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        tp.convert(nn.Sequential(nn.RMSNorm(128)), precision, **options)


def test_a_converted_model_loads_and_saves_plain_checkpoints():
    torch.manual_seed(0)
    plain = Block().state_dict()
    model = Block()
    tp.convert(model, precision="fp8_delayed")
    model.load_state_dict(plain)
    assert torch.equal(model.up.weight, plain["up.weight"])
    with pytest.raises(RuntimeError, match="up.wieght"):
        model.load_state_dict({**plain, "up.wieght": plain["up.weight"]})
    again = Block()
    tp.convert(again, precision="fp8_delayed")
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.up.state.delayed.scale, model.up.state.delayed.scale)
