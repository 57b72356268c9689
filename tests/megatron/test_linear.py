"""Parallel linear layers: weight cache, gradient accumulation, attributes, checkpoints."""

from __future__ import annotations

import pytest
import torch
from megatron_models import build, mean_loss, packed_batch, small_config

from te_plugin import megatron as plugin


@pytest.fixture
def config():
    cfg = small_config("precision=bf16")
    plugin.initialize(cfg)
    return plugin.transformer_config(cfg)


def fp32_config():
    cfg = small_config()
    plugin.initialize(cfg)
    return plugin.transformer_config(cfg)


def tp_group():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def linear(kind, config, k=32, n=48, precision=None, **options):
    made = kind(k, n, config=config, init_method=torch.nn.init.normal_, tp_group=tp_group(), **options)
    torch.manual_seed(1)
    with torch.no_grad():
        made.weight.normal_()
    if precision is not None:
        made._set_precision(precision)
    return made


BOTH = pytest.mark.parametrize("kind", [plugin.ColumnParallelLinear, plugin.RowParallelLinear])


@BOTH
def test_forward_and_backward_are_those_of_a_linear_layer(kind):
    layer = linear(kind, fp32_config(), bias=True)
    with torch.no_grad():
        layer.bias.normal_()
    x = torch.randn(6, 1, 32, requires_grad=True)
    y, bias = layer(x)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert bias is None
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    for a, b in zip(ours, torch.autograd.grad(expected, (x, layer.weight, layer.bias), dy), strict=True):
        torch.testing.assert_close(a, b)


@BOTH
def test_a_skipped_bias_is_returned_and_not_added(kind):
    layer = linear(kind, fp32_config(), bias=True, skip_bias_add=True)
    with torch.no_grad():
        layer.bias.fill_(3.0)
    x = torch.randn(6, 1, 32)
    y, bias = layer(x)
    assert bias is layer.bias
    torch.testing.assert_close(y, torch.nn.functional.linear(x, layer.weight))


@pytest.mark.report("NVIDIA/Megatron-LM#629")
@BOTH
def test_an_fp8_weight_is_cast_once_a_step_whatever_the_microbatches(kind, config):
    layer = linear(kind, config, precision=plugin.LinearPrecision("fp8_current"))
    x = torch.randn(16, 1, 32, dtype=torch.bfloat16)
    for step in range(1, 3):
        layer.is_first_microbatch = True
        for _ in range(4):
            layer(x)[0].sum().backward()
        assert layer.state.weight_casts == step
        with torch.no_grad():
            layer.weight.mul_(2)


@BOTH
def test_the_first_microbatch_takes_weights_that_were_written_behind_autograds_back(kind, config):
    """FSDP2 and fused optimizers write through .data, which no version counter sees."""
    layer = linear(kind, config, precision=plugin.LinearPrecision("fp8_current"))
    x = torch.randn(16, 1, 32, dtype=torch.bfloat16)
    before = layer(x)[0]
    layer.weight.data.mul_(2)
    layer.is_first_microbatch = True
    assert torch.equal(layer(x)[0], 2 * before)


def test_a_recipe_lets_megatron_announce_the_first_microbatch():
    model = build("layout=thd", "precision=fp8_current")
    linears = [m for m in model.modules() if isinstance(m, plugin.linear.ParallelLinear)]
    mean_loss(model, packed_batch([16, 16]))
    assert not any(m.is_first_microbatch for m in linears)
    model.set_is_first_microbatch()
    assert all(m.is_first_microbatch for m in linears)


@pytest.mark.report("AMD-AGI/Primus#1046")
@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2, 32])
def test_main_grad_is_the_sum_over_microbatches_each_once(config, precision, fused, microbatches):
    """Gradient 1 from each microbatch: main_grad is their number; Megatron's hook adds param.grad unless told not to."""
    layer = linear(plugin.ColumnParallelLinear, config, k=16, n=16, precision=plugin.LinearPrecision(precision, main_grad=fused))
    layer.weight.main_grad = torch.zeros(16, 16)
    layer.weight.grad_added_to_main_grad = False

    def hook(parameter):  # what Megatron's DDP does when a gradient arrives
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(hook)
    x = torch.zeros(16, 1, 16, dtype=torch.bfloat16)
    x[0] = 1.0
    for microbatch in range(microbatches):
        layer.is_first_microbatch = microbatch == 0
        layer.weight.grad_added_to_main_grad = False
        layer(x)[0].sum().backward()
        assert layer.weight.grad_added_to_main_grad == fused
    assert torch.equal(layer.weight.main_grad, torch.full((16, 16), float(microbatches)))
    assert layer.weight.grad is None


@pytest.mark.report("ISEEKYAN/Megatron-LM#146")
def test_main_grad_accumulates_in_fp32(config):
    """256 + 1 is 256 in BF16."""
    layer = linear(plugin.ColumnParallelLinear, config, k=16, n=16, precision=plugin.LinearPrecision("bf16", main_grad=True))
    layer.weight.main_grad = torch.zeros(16, 16)
    for size in (256.0, 1.0):
        x = torch.zeros(16, 1, 16, dtype=torch.bfloat16)
        x[0] = size
        layer(x)[0].sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.full((16, 16), 257.0))
    assert layer.weight.grad is None


def test_parameters_carry_the_attributes_megatron_reads(config):
    column = linear(plugin.ColumnParallelLinear, config, bias=True, stride=2)
    row = linear(plugin.RowParallelLinear, config, bias=True)
    assert (column.weight.tensor_model_parallel, column.weight.partition_dim, column.weight.partition_stride) == (True, 0, 2)
    assert (column.bias.tensor_model_parallel, column.bias.partition_dim) == (True, 0)
    assert (row.weight.tensor_model_parallel, row.weight.partition_dim, row.weight.partition_stride) == (True, 1, 1)
    assert not hasattr(row.bias, "tensor_model_parallel") and row.bias.sequence_parallel is False
    assert all(p.allreduce for layer in (column, row) for p in layer.parameters())
    config.sequence_parallel = True
    assert plugin.RMSNorm(config=config, hidden_size=8).weight.sequence_parallel is True
    config.expert_model_parallel_size = 2
    assert linear(plugin.ColumnParallelLinear, config, is_expert=True).weight.allreduce is False


def test_sharded_state_names_every_parameter_once():
    model = build("layout=thd", "precision=fp8_current")
    from megatron.core import parallel_state

    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    keys = set(model.sharded_state_dict(metadata=groups))
    assert {name for name, _ in model.named_parameters()} <= keys


def test_a_weight_handed_in_at_call_time_is_refused(config):
    with pytest.raises(ValueError, match="skip_weight_param_allocation"):
        linear(plugin.ColumnParallelLinear, config, skip_weight_param_allocation=True)


def test_delayed_scaling_state_survives_a_state_dict_round_trip():
    batch = packed_batch([16, 32])
    model, other = (build("layout=thd", "precision=fp8_delayed") for _ in range(2))
    for _ in range(2):
        mean_loss(model, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)
    other.load_state_dict(model.state_dict())
    for layer in (model, other):
        layer.set_is_first_microbatch()
    with torch.no_grad():
        assert torch.equal(mean_loss(model, batch), mean_loss(other, batch))
