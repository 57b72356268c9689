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
    with pytest.raises(ValueError, match="a name holds a semicolon: .*a;b"):
        tp.linear(torch.ones(16, 64), torch.ones(64, 64), kernel="a;b")


def test_a_call_and_its_state_agree_on_the_kind_of_scale():
    x, w = torch.ones(16, 64), torch.ones(64, 64)
    with pytest.raises(ValueError, match="state has pow2_scale=False, the call asks for True"):
        tp.linear(x, w, precision="fp8_current", state=tp.LinearState("fp8_current"), pow2_scale=True)
    with pytest.raises(ValueError, match="state has pow2_scale=True, the call asks for False"):
        tp.grouped_linear(x, w[None], torch.tensor([16]), "fp8_current", state=tp.LinearState("fp8_current", pow2_scale=True))


X, W = torch.ones(16, 64), torch.ones(64, 64)
SEGMENTS = dict(cu_seqlens_q=torch.tensor([0, 16], dtype=torch.int32))


@pytest.mark.parametrize("flag, call", [
    ("pow2_scale", lambda v: tp.linear(X, W, precision="fp8_current", pow2_scale=v)),
    ("keep_transpose", lambda v: tp.grouped_linear(X, W[None], torch.tensor([16]), "fp8_current", keep_transpose=v)),
    ("accumulate_main_grad", lambda v: tp.layer_norm_linear(X, W[0], W, accumulate_main_grad=v)),
    ("return_input", lambda v: tp.gated_mlp(X, W[0], W, W[:, :32], return_input=v)),
    ("return_input", lambda v: tp.rms_norm(X, W[0], return_input=v)),
    ("deterministic", lambda v: tp.attention(*[X.view(16, 2, 32)] * 3, **SEGMENTS, deterministic=v)),
    ("return_lse", lambda v: tp.attention(*[X.view(16, 2, 32)] * 3, **SEGMENTS, return_lse=v)),
    ("deterministic", lambda v: tp.DotProductAttention(deterministic=v)),
    ("transpose", lambda v: tp.quantize(X, transpose=v)),
    ("pow2_scale", lambda v: tp.quantize_many([X], pow2_scale=v)),
    ("pow2_scale", lambda v: tp.qkv_rope_quantize(X, torch.arange(16), heads=2, kv_heads=1, inv_freq=W[0, :8], pow2_scale=v)),
    ("bias", lambda v: tp.Linear(64, 64, v)),
    ("accumulate_main_grad", lambda v: tp.LayerNormMLP(64, 64, accumulate_main_grad=v)),
    ("norms", lambda v: tp.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), norms=v)),
])  # fmt: skip
@pytest.mark.parametrize("value", ["no", 1, None], ids=repr)
def test_flags_of_calls_are_true_or_false(flag, call, value):
    with pytest.raises(ValueError, match=f"{flag}={value!r} must be True or False"):
        call(value)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_scales_cannot_be_chosen_where_there_are_none(precision):
    for call in (lambda: tp.linear(X, W, precision=precision, pow2_scale=True),
                 lambda: tp.grouped_linear(X, W[None], torch.tensor([16]), precision, pow2_scale=True),
                 lambda: tp.gated_mlp(X, None, W, W[:, :32], precision=precision, pow2_scale=True)):
        with pytest.raises(ValueError, match=f"pow2_scale=True: precision {precision} has no scales"):
            call()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_codes_are_not_taken_for_the_values_of_a_weight(dtype, precision):
    for call in (lambda: tp.linear(X, W.to(dtype), precision=precision), lambda: tp.linear(X, W, W[0].to(dtype), precision),
                 lambda: tp.layer_norm_linear(X, W[0], W.to(dtype), precision=precision),
                 lambda: tp.grouped_linear(X, W[None].to(dtype), torch.tensor([16]), precision)):
        with pytest.raises(ValueError, match=f"(weight|bias) is {dtype}.*dequantize it first"):
            call()


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_tensors_on_two_devices_are_named(precision):
    """A weight on "meta" has no memory, and a product with it has no values."""
    for call in (lambda: tp.linear(X, W.to("meta"), precision=precision), lambda: tp.linear(X, W, W[0].to("meta"), precision),
                 lambda: tp.layer_norm_linear(X, W[0], W.to("meta"), precision=precision),
                 lambda: tp.gated_mlp(X, W[0], W, W[:, :32].to("meta"), precision=precision),
                 lambda: tp.grouped_linear(X, W[None].to("meta"), torch.tensor([16]), precision)):
        with pytest.raises(ValueError, match="(weight|bias) is on meta, the tensor to work on is on cpu"):
            call()
    made = tp.quantize(X)
    with pytest.raises(ValueError, match="scale_inv is on meta"):
        tp.dequantize(made.data, made.scale_inv.to("meta"), "tensor", "e4m3")


@pytest.mark.report("NVIDIA/Megatron-LM#688")
@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_a_weight_that_gets_no_gradient_needs_no_main_grad(precision):
    layer = tp.Linear(64, 64, precision=precision, accumulate_main_grad=True)
    with torch.no_grad():
        layer(X)
    layer.requires_grad_(False)
    x = X.clone().requires_grad_()
    layer(x).sum().backward()
    assert x.grad.any()


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


def test_a_row_mask_of_the_other_order_is_refused_though_its_size_fits():
    mask = torch.ones(3, 2, dtype=torch.bool)
    for call in (lambda: tp.linear(torch.ones(2, 3, 64), W, row_mask=mask),
                 lambda: tp.layer_norm_linear(torch.ones(2, 3, 64), W[0], W, precision="fp8_current", row_mask=mask)):
        with pytest.raises(ValueError, match=r"row_mask has shape \(3, 2\).*\(2, 3\)"):
            call()
    assert tp.linear(torch.ones(2, 3, 64), W, row_mask=mask.view(6)).all()  # a flat one has no order to mistake


def test_a_grouped_layer_refuses_delayed_scaling_when_it_is_built():
    with pytest.raises(ValueError, match="fp8_delayed keeps a history per tensor"):
        tp.GroupedLinear(2, 32, 32, precision="fp8_delayed")
