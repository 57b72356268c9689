"""An option that a layer's scaling cannot use is refused where it is given."""

import pytest
import torch

import te_plugin.torch as tp


@pytest.mark.parametrize("precision, options", [
    ("fp8_delayed", {"pow2_scale": True}), ("fp8_current", {"history_len": 4}), ("fp8_block", {"amax_compute": "most_recent"}),
    ("fp8_current", {"amax_compute": "nonsense"})], ids=str)  # fmt: skip
def test_options_that_would_do_nothing_are_refused(precision, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*{precision}"):
        tp.Linear(128, 128, precision=precision, **options)


@pytest.mark.parametrize("options", [{"weight_cache": "none"}, {"keep_transpose": "no"}, {"pow2_scale": 1}], ids=str)
def test_flags_are_true_or_false(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* must be True or False"):
        tp.Linear(128, 128, precision="fp8_current", **options)


def test_a_kernel_is_asked_for_by_name():
    with pytest.raises(ValueError, match="kernel=True must be a name"):
        tp.linear(torch.ones(16, 64), torch.ones(64, 64), kernel=True)


def test_a_call_and_its_state_agree_on_the_kind_of_scale():
    x, w = torch.ones(16, 64), torch.ones(64, 64)
    with pytest.raises(ValueError, match="state has pow2_scale=False, the call asks for True"):
        tp.linear(x, w, precision="fp8_current", state=tp.LinearState("fp8_current"), pow2_scale=True)
    with pytest.raises(ValueError, match="state has pow2_scale=True, the call asks for False"):
        tp.grouped_linear(x, w[None], torch.tensor([16]), "fp8_current", state=tp.LinearState("fp8_current", pow2_scale=True))


@pytest.mark.parametrize("main_grad", [None, torch.zeros(32, 16, dtype=torch.bfloat16), torch.zeros(16, 32)])
def test_main_grad_that_cannot_take_the_gradient_is_refused_before_the_forward(main_grad):
    weight = torch.randn(32, 16).requires_grad_()
    if main_grad is not None:
        weight.main_grad = main_grad
    for call in (lambda: tp.linear(torch.randn(4, 16), weight, accumulate_main_grad=True),
                 lambda: tp.grouped_linear(torch.randn(4, 16), weight[None], torch.tensor([4]), accumulate_main_grad=True)):
        with pytest.raises(ValueError, match="main_grad, FP32"):
            call()


def test_a_row_mask_needs_one_value_a_row():
    with pytest.raises(ValueError, match=r"row_mask has shape \(1,\).*\(4,\)"):
        tp.linear(torch.randn(4, 16), torch.randn(32, 16), row_mask=torch.tensor([True]))


def test_a_grouped_layer_refuses_delayed_scaling_when_it_is_built():
    with pytest.raises(ValueError, match="fp8_delayed keeps a history per tensor"):
        tp.GroupedLinear(2, 32, 32, precision="fp8_delayed")
