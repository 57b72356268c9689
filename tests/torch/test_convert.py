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


class GemmaRMSNorm(nn.Module):
    """Stores the difference to 1."""

    def __init__(self, features=128):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(features)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class GatedRMSNorm(nn.Module):
    def __init__(self, features=128):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(features)), 1e-6

    def forward(self, x, gate=None):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y if gate is None else y * torch.sigmoid(gate)


class LlamaRMSNorm(nn.Module):
    def __init__(self, features=128):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(features, dtype=torch.bfloat16)), 1e-6

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


@pytest.mark.report("linkedin/Liger-Kernel#74")
def test_norms_that_compute_something_else_are_left_alone():
    model = nn.ModuleDict(dict(gemma=GemmaRMSNorm(), gated=GatedRMSNorm(), llama=LlamaRMSNorm(), linear=nn.Linear(128, 128)))
    x = torch.randn(4, 128)
    before = model.gemma(x), model.gated(x, x)
    report = tp.convert(model, "fp8_current")
    assert [name for name, _ in report.converted] == ["llama", "linear"]
    assert "something else" in dict(report.skipped)["gemma"] and "more than x" in dict(report.skipped)["gated"]
    assert torch.equal(model.gemma(x), before[0]) and torch.equal(model.gated(x, x), before[1])


@pytest.mark.report("linkedin/Liger-Kernel#74")
def test_a_norm_without_storage_is_compared_as_well():
    with torch.device("meta"):
        model = nn.Sequential(GemmaRMSNorm(), LlamaRMSNorm())
    report = tp.convert(model, "fp8_current")
    assert [name for name, _ in report.converted] == ["1"] and model[1].weight.is_meta


@pytest.mark.report("huggingface/peft#761")
def test_a_projection_that_its_owner_never_calls_is_not_called_converted():
    model = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    report = tp.convert(model, "fp8_current")
    assert [name for name, _ in report.converted] == ["linear1", "linear2"]
    assert "never calls it" in dict(report.skipped)["self_attn.out_proj"]


def test_a_module_in_two_places_stays_one_module():
    model = nn.ModuleDict(dict(a=nn.Linear(128, 128), b=nn.Linear(128, 128)))
    model["c"] = model["a"]
    report = tp.convert(model, "fp8_current")
    assert [name for name, _ in report.converted] == ["a", "b", "c"]
    assert model["a"] is model["c"] and isinstance(model["a"], tp.Linear)


def test_what_a_new_linear_would_not_do_is_left_alone():
    model = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("replaced", "normed", "loads", "plain")})
    model["replaced"].forward = lambda x: x * 0
    nn.utils.parametrizations.weight_norm(model["normed"])
    model["loads"].register_load_state_dict_pre_hook(lambda *_: None)
    reasons = dict(tp.convert(model, "fp8_current").skipped)
    assert set(reasons) == {"replaced", "normed", "loads"}
    assert "overrides forward" in reasons["replaced"] and "computed" in reasons["normed"] and "hooks" in reasons["loads"]


def test_one_pattern_may_be_given_without_a_tuple():
    model = nn.ModuleDict(dict(head=nn.Linear(128, 128), h=nn.Linear(128, 128)))
    assert [name for name, _ in tp.convert(model, "fp8_current", skip="head").converted] == ["h"]


class Scaled(torch.nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Adapted(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = torch.nn.Parameter(torch.ones(1))


def codes(dtype):
    layer = torch.nn.Linear(128, 128).requires_grad_(False)
    layer.weight.data = layer.weight.to(dtype)
    return layer


@pytest.mark.parametrize("layer, reason", [
    (Scaled(128, 128), "Scaled overrides __call__"),
    (Adapted(128, 128), "it holds adapter besides"),
    (codes(torch.float8_e4m3fn), "its weight is torch.float8_e4m3fn"),
    (codes(torch.int8), "its weight is torch.int8"),
    (torch.nn.Linear(128, 128).double(), "its weight is torch.float64"),
], ids=["call", "parameter", "fp8 codes", "int8 codes", "fp64"])  # fmt: skip
def test_a_linear_that_a_new_one_could_not_stand_for_is_left_with_the_reason(layer, reason):
    model = torch.nn.Sequential(layer, torch.nn.Linear(128, 128))
    report = tp.convert(model)
    assert model[0] is layer and report.skipped[0][1].startswith(reason) and len(report.converted) == 1


def test_a_pattern_leaves_all_that_is_within_a_module_and_one_that_matches_nothing_is_refused():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(128, 128)), torch.nn.Linear(128, 128))
    with pytest.raises(ValueError, match="skip: 'attention' matches no module of Sequential; names are such as 0, 0.0, 1"):
        tp.convert(model, skip=("0", "attention"))
    assert type(model[1]) is torch.nn.Linear
    report = tp.convert(model, skip="0")
    assert report.skipped == [("0.0", "its name is in skip")] and len(report.converted) == 1
