"""precision.fuse: norms inside the linear layers and the MLP as one call change no bit, no checkpoint name and no answer."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron_models import build, mean_loss, packed_batch, small_config

from te_plugin import megatron as plugin
from te_plugin.config import ConfigError
from te_plugin.megatron.build import build_stage
from te_plugin.torch import launches
from te_plugin.training.optimizer import stored_parameters

WIDE = ("model.hidden_size=128", "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=32", "model.ffn_hidden_size=256")
BATCH = packed_batch([16, 31], gaps=[3, 2])


def pair(*overrides: str):
    return [build("layout=thd", *WIDE, *overrides, f"precision.fuse={fuse}") for fuse in ("true", "false")]


def steps(model, count: int = 3) -> list:
    """Losses, gradients and FP8 state of a few steps of plain gradient descent."""
    seen = []
    for step in range(count):
        for _ in range(2):
            loss = mean_loss(model, BATCH)
            loss.backward()
            seen.append(loss.detach())
        for name, parameter in stored_parameters(model):
            seen += [name, parameter.grad.clone()]
            with torch.no_grad():
                parameter -= 0.1 * (step + 1) * parameter.grad
            parameter.grad = None
        model.set_is_first_microbatch()
        seen += [value.clone() for name, value in sorted(model.state_dict().items()) if ".delayed." in name]
    return seen


def check_equal(a, b):
    assert len(a) == len(b)
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        assert one == other if isinstance(one, str) else torch.equal(one, other), (index, one)


@pytest.mark.parametrize("extra", [(), ("precision.keep_transpose=false",), ("precision.bf16_layers_at_end=1",)], ids=str)
@pytest.mark.parametrize("precision", ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8"])
def test_fused_layers_change_no_bit(precision, extra):
    fused, separate = pair(f"precision={precision}", *extra)
    layers = fused.decoder.layers[0], separate.decoder.layers[0]
    assert isinstance(layers[0].input_layernorm, IdentityOp) and isinstance(layers[1].input_layernorm, plugin.RMSNorm)
    assert type(layers[0].mlp) is plugin.GatedMLP and type(layers[1].mlp) is MLP
    check_equal(steps(fused), steps(separate))


def test_a_mixture_keeps_its_norm_before_the_router_and_changes_no_bit():
    fused, separate = pair("precision=fp8_current", "moe=tiny", "moe.ffn_hidden_size=256")
    layer = fused.decoder.layers[0]
    assert isinstance(layer.pre_mlp_layernorm, plugin.RMSNorm) and isinstance(layer.input_layernorm, IdentityOp)
    check_equal(steps(fused, 2), steps(separate, 2))


def test_the_fused_ops_run_and_the_mlp_is_one_call():
    (fused, separate), ops = pair("precision=fp8_current"), []
    for model in (fused, separate):
        launches.reset()
        mean_loss(model, BATCH).backward()
        ops.append({row["op"] for row in launches.snapshot()})
    assert ops[0] - ops[1] == {"norm_quantize", "activation_quantize"}


def test_hooks_and_mixed_precisions_take_megatrons_own_order_of_calls():
    fused, separate = pair("precision=fp8_current")
    mlp, called = fused.decoder.layers[0].mlp, []
    assert mlp._is_one_call()
    handle = mlp.linear_fc2.register_forward_pre_hook(lambda *_: called.append("fc2"))
    assert not mlp._is_one_call()
    assert torch.equal(mean_loss(fused, BATCH), mean_loss(separate, BATCH)) and called == ["fc2"]
    handle.remove()
    mlp.linear_fc2._set_precision(plugin.LinearPrecision("bf16"))
    separate.decoder.layers[0].mlp.linear_fc2._set_precision(plugin.LinearPrecision("bf16"))
    assert not mlp._is_one_call()
    assert torch.equal(mean_loss(fused, BATCH), mean_loss(separate, BATCH))


@pytest.mark.parametrize("overrides", [(), ("moe=tiny", "moe.ffn_hidden_size=256")], ids=["dense", "moe"])
def test_checkpoints_of_both_forms_hold_the_same_tensors(overrides):
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    keys = []
    for model in pair("precision=fp8_current", *overrides):
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        found = set()
        for value in model.sharded_state_dict(metadata=metadata).values():
            for part in value.build() if isinstance(value, ShardedTensorFactory) else [value]:
                if isinstance(part, ShardedTensor):
                    found.add((part.key, tuple(part.global_shape), tuple(part.global_offset)))
        keys.append(found)
    assert keys[0] == keys[1]
    assert any(key.endswith("self_attention.linear_qkv.layer_norm_weight") for key, *_ in keys[0])


def test_common_names_are_those_of_the_separate_form():
    cfg = small_config(*WIDE)
    fused, separate = (dict(plugin.common_weights(model, cfg.model)) for model in pair("precision=fp8_current"))
    assert set(fused) == set(separate) and all(torch.equal(fused[name], separate[name]) for name in fused)


def test_stored_names_and_their_order_are_those_of_the_separate_form():
    fused, separate = pair("precision=fp8_current")
    assert [name for name, _ in stored_parameters(fused)] == [name for name, _ in separate.named_parameters()]
    assert stored_parameters(separate) == list(separate.named_parameters())


def linear(config, **options):
    return plugin.LayerNormColumnParallelLinear(8, 16, config=config, init_method=torch.nn.init.ones_, **options)


def test_what_the_module_cannot_do_is_refused_by_name():
    cfg = small_config()
    plugin.initialize(cfg)
    config = plugin.transformer_config(cfg)
    with pytest.raises(ConfigError, match="is_expert=True"):
        linear(config, is_expert=True)
    config.normalization = "LayerNorm"
    with pytest.raises(ConfigError, match="normalization='LayerNorm'"):
        linear(config)
    config.normalization, config.layernorm_zero_centered_gamma = "RMSNorm", True
    with pytest.raises(ConfigError, match="layernorm_zero_centered_gamma"):
        linear(config)


def test_fused_residual_rmsnorm_adds_the_residuals_gradient_inside_the_norm():
    """Both norms of a layer; the final norm has no residual after it."""
    results = []
    for joined in (False, True):
        cfg = small_config("layout=thd")
        plugin.initialize(cfg)
        config = plugin.transformer_config(cfg)
        config.fused_residual_rmsnorm = joined
        model = build_stage(cfg, config, "cpu", True, True)
        launches.reset()
        mean_loss(model, BATCH).backward()
        stages = [row["launches"] for row in launches.snapshot() if row["op"] == "norm"]
        assert sum(row.get("residual_backward", 0) for row in stages) == (2 * cfg.model.num_layers if joined else 0)
        results.append([parameter.grad for _, parameter in stored_parameters(model)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_fused_residual_rmsnorm_is_refused_where_it_would_do_nothing():
    cfg = small_config()
    plugin.initialize(cfg)
    config = plugin.transformer_config(cfg)
    config.fused_residual_rmsnorm = True
    with pytest.raises(ConfigError, match="no norm of this model stands alone.*fuse=False"):
        plugin.layer_spec(config)
    plugin.layer_spec(config, fuse=False)


def test_under_sequence_parallelism_the_norm_runs_on_the_shard_and_its_gradient_is_reduced(monkeypatch):
    """Gathers need a GPU in Megatron: here the one-rank gather is a plain function, and the order of calls is what is checked."""
    from te_plugin.megatron import linear as plain
    from te_plugin.megatron import norm_linear

    cfg = small_config("precision=bf16")
    plugin.initialize(cfg)
    config = plugin.transformer_config(cfg)
    config.sequence_parallel, config.perform_initialization = True, True
    layer, order = linear(config), []
    layer._set_precision(plugin.LinearPrecision("fp8_current"))
    assert layer.layer_norm_weight.sequence_parallel is True
    layer.sequence_parallel = True
    gathered = lambda x, group: order.append(("gather", x.shape)) or torch.cat([x, x])
    monkeypatch.setattr(plain, "gather_from_sequence_parallel_region", gathered)
    monkeypatch.setattr(norm_linear.LayerNormColumnParallelLinear, "norm", lambda self, x: order.append(("norm", x.shape)) or x)
    monkeypatch.setattr(plain.ColumnParallelLinear, "multiply", lambda self, x, bias: order.append(("product", x.shape)) or x)
    layer(torch.ones(4, 1, 8, dtype=torch.bfloat16))
    assert order == [("norm", (4, 1, 8)), ("gather", (4, 1, 8)), ("product", (8, 1, 8))]
