"""Mixture of experts: grouped equals looped, token counts stay on the device, padding is counted nowhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron_models import build, mean_loss, packed_batch, small_config

from te_plugin import megatron as plugin
from te_plugin.config import ConfigError
from te_plugin.torch import functional
from te_plugin.torch.batch import to_device

MOE = ("layout=thd", "moe=tiny", "moe.ffn_hidden_size=96")


def train(grouped: bool, *overrides: str, steps: int = 4):
    model = build(*MOE, f"moe.grouped_gemm={str(grouped).lower()}", *overrides)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for step in range(steps):
        loss = mean_loss(model, packed_batch([30, 21, 40], seed=step % 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def test_grouped_experts_equal_the_loop_over_experts_through_training():
    grouped, a = train(True)
    looped, b = train(False)
    assert a == pytest.approx(b, abs=1e-6)
    assert a[2] < a[0]
    cfg = small_config(*MOE)
    left, right = (dict(plugin.common_weights(m, cfg.model)) for m in (grouped, looped))
    assert all((left[name] - right[name]).abs().max() < 1e-5 for name in left)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_rowwise"])
def test_grouped_experts_train_in_every_precision(precision):
    model, losses = train(True, f"precision={precision}", steps=2)
    assert plugin.precision_report(model)["decoder.layers.1.mlp.experts.linear_fc2"] == precision
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert losses[0] == pytest.approx(train(False, steps=1)[1][0], rel=2e-2)


def experts(precision: str = "fp32", num_experts: int = 4):
    cfg = small_config(*MOE, f"precision={precision}")
    plugin.initialize(cfg)
    model = plugin.build_gpt(cfg)
    return model.decoder.layers[0].mlp.experts


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_rowwise"])
def test_a_step_quantises_the_weights_of_experts_once_for_all_its_microbatches(precision):
    module = experts(precision)
    for linear in (module.linear_fc1, module.linear_fc2):
        linear.weight.main_grad = torch.zeros(linear.weight.shape)
        linear.precision = dataclasses.replace(linear.precision, main_grad=True)
    for step in range(2):
        for linear in (module.linear_fc1, module.linear_fc2):
            linear.is_first_microbatch = True
        for _ in range(3):
            y, _ = module(torch.randn(7, 64, requires_grad=True), torch.tensor([4, 0, 3, 0]), torch.rand(7))
            y.sum().backward()
        assert [linear.state.weight_casts for linear in (module.linear_fc1, module.linear_fc2)] == [step + 1] * 2
    for linear in (module.linear_fc1, module.linear_fc2):
        assert linear.weight.grad is None and linear.weight.main_grad[0].any() and not linear.weight.main_grad[1].any()


@pytest.mark.report("tgale96/grouped_gemm#36")
@pytest.mark.parametrize("counts", [[4, 0, 3, 0], [7, 0, 0, 0], [0, 0, 0, 7], [0, 0, 0, 0]])
def test_empty_experts_get_a_gradient_of_exactly_zero(counts):
    module = experts()
    x = torch.randn(sum(counts), 64, requires_grad=True)
    y, bias = module(x, torch.tensor(counts), torch.rand(sum(counts)))
    assert bias is None and y.shape == x.shape and torch.isfinite(y).all()
    y.sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        for expert, count in enumerate(counts):
            assert torch.count_nonzero(parameter.grad[expert]) > 0 if count else torch.count_nonzero(parameter.grad[expert]) == 0


def test_token_counts_reach_the_grouped_gemm_as_a_tensor(monkeypatch):
    """A host copy of the counts would stall a GPU in every layer."""
    module, seen = experts(), []

    def spy(x, weight, group_sizes, *args, **kwargs):
        seen.append(group_sizes)
        return x.new_zeros(x.shape[0], weight.shape[1])

    def forbidden(*_):
        raise AssertionError("token counts were copied to the host")

    monkeypatch.setattr(functional, "grouped_linear", spy)
    counts = torch.tensor([3, 0, 2, 2])
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__index__"):
            patch.setattr(torch.Tensor, name, forbidden)
        module(torch.randn(7, 64), counts, torch.rand(7))
    assert len(seen) == 2 and all(isinstance(c, torch.Tensor) and c.dtype == torch.int32 for c in seen)


def test_the_auxiliary_loss_weighs_the_same_in_one_microbatch_and_in_two():
    """Two equal microbatches, each divided by the step's tokens, give the gradient of one of them taken alone."""
    batch = packed_batch([30, 21])
    grads = []
    for microbatches in (1, 2):
        model = build(*MOE, "moe.aux_loss_coeff=1.0")
        sent = to_device(batch, "cpu")
        for _ in range(microbatches):
            (plugin.gpt_token_losses(model, sent).sum() / (microbatches * sent.loss_tokens)).backward()
        grads.append(model.decoder.layers[0].mlp.router.weight.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-8)
    without = build(*MOE, "moe.aux_loss_coeff=0.0")
    mean_loss(without, batch).backward()
    aux = grads[0] - without.decoder.layers[0].mlp.router.weight.grad
    assert aux.abs().max() > 1e-4  # and it is there


@pytest.mark.report("NVIDIA/TransformerEngine#2911")
def test_padding_rows_change_no_expert_and_no_router():
    model = build(*MOE)
    grads = []
    for batch in (packed_batch([30, 21]), packed_batch([30, 21], gaps=[9, 4])):
        model.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if "mlp" in name})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.bfloat16), ("bf16", torch.float32)])
def test_grouped_experts_refuse_a_precision_that_is_not_their_parameters(precision, dtype):
    """They would compute in the parameters' dtype, and report the other."""
    cfg = small_config("moe=tiny")
    plugin.initialize(cfg)
    config = dataclasses.replace(plugin.transformer_config(cfg), params_dtype=dtype)
    experts = plugin.GroupedExperts(2, config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    recipe = {"configs": {"mine": {"te_plugin": {"precision": precision}}},
              "matchers": {"all": {"type": "glob", "enabled": True, "pattern": "*", "config": "mine"}}}
    matched = get_quant_config_or_none("mlp.experts.linear_fc1", RecipeConfig.from_config_dict(recipe))
    with pytest.raises(ConfigError, match=f"mlp.experts.linear_fc1: precision {precision} with .* parameters"):
        experts.linear_fc1.finish_init(matched)


def test_grouped_experts_refuse_fast_accumulation():
    from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig

    cfg = small_config(*MOE)
    plugin.initialize(cfg)
    config = plugin.transformer_config(cfg)
    payload = {"te_plugin": {"precision": "fp8_current", "forward_accumulation": "fast"}}
    config.quant_recipe = RecipeConfig(matchers=[GlobMatcher("*", "fast")], config_dict={"fast": payload})
    with pytest.raises(ConfigError, match="grouped experts with forward_accumulation=fast: grouped products add in FP32"):
        plugin.build_stage(cfg, config, "cpu", True, True)


def test_several_processes_with_experts_on_the_cpu_are_refused():
    cfg = small_config(*MOE)
    cfg.parallel.expert_parallel = 2
    with pytest.raises(ConfigError, match="CUDA buffers"):
        plugin.transformer_config(cfg)


@pytest.mark.parametrize(("field", "value"), [("add_bias_linear", True), ("moe_apply_probs_on_input", True),
                                              ("glu_linear_offset", 1.0)])
def test_grouped_experts_refuse_what_they_do_not_compute(field, value):
    cfg = small_config(*MOE)
    plugin.initialize(cfg)
    config = dataclasses.replace(plugin.transformer_config(cfg))
    setattr(config, field, value)
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    with pytest.raises(ConfigError, match=field):
        plugin.GroupedExperts(4, config, pg_collection=get_default_pg_collection())


def test_grouped_and_sequential_experts_share_a_checkpoint_layout():
    """Same keys, same global shapes, same slices: either can load what the other saved."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def flat(model):
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        found = {}
        for value in model.sharded_state_dict(metadata=metadata).values():
            parts = value.build() if isinstance(value, ShardedTensorFactory) else [value]
            for part in parts:
                if isinstance(part, ShardedTensor):
                    found[part.key, part.global_offset] = (part.global_shape, part.local_shape, part.data)
        return found

    grouped, looped = (flat(build(*MOE, f"moe.grouped_gemm={g}")) for g in ("true", "false"))
    assert set(grouped) == set(looped)
    for key, (shape, local, data) in grouped.items():
        assert (shape, local) == looped[key][:2], key
        assert torch.equal(data, looped[key][2]), key


def test_a_stacked_weight_survives_the_way_through_its_checkpoint_parts():
    module = experts()
    factory = module.sharded_state_dict(prefix="x.")["x.linear_fc1.weight"]
    rebuilt = factory.merge_fn([part.data for part in factory.build()])
    assert torch.equal(rebuilt, module.linear_fc1.weight)
