"""Megatron's side of the contract: how it builds and calls modules. An upstream change must fail here, not in training."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import megatron.core
import pytest
import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import attention, mlp, torch_norm, transformer_layer
from megatron.core.transformer.moe import moe_layer

from te_plugin import megatron as plugin

PROTOCOLS = [
    (attention.LinearQkvBuilder, plugin.ColumnParallelLinear),
    (attention.LinearLayerBuilder, plugin.ColumnParallelLinear),
    (mlp.LinearFc1Builder, plugin.ColumnParallelLinear),
    (attention.LinearQkvBuilder, plugin.LayerNormColumnParallelLinear),
    (mlp.LinearFc1Builder, plugin.LayerNormColumnParallelLinear),
    (attention.LinearProjBuilder, plugin.RowParallelLinear),
    (mlp.LinearFc2Builder, plugin.RowParallelLinear),
    (attention.CoreAttentionBuilder, plugin.CoreAttention),
    (torch_norm.LayerNormBuilder, plugin.RMSNorm),
    (mlp.TEActivationFunctionBuilder, plugin.SwiGLU),
    (moe_layer.ExpertsBuilder, plugin.GroupedExperts),
    (moe_layer.RouterBuilder, plugin.Router),
]
INTERFACES = [
    (attention.LinearQkvInterface, plugin.ColumnParallelLinear),
    (mlp.LinearFc1Interface, plugin.ColumnParallelLinear),
    (attention.LinearQkvInterface, plugin.LayerNormColumnParallelLinear),
    (mlp.LinearFc1Interface, plugin.LayerNormColumnParallelLinear),
    (attention.LinearProjInterface, plugin.RowParallelLinear),
    (mlp.LinearFc2Interface, plugin.RowParallelLinear),
    (attention.CoreAttentionInterface, plugin.CoreAttention),
    (torch_norm.LayerNormInterface, plugin.RMSNorm),
    (moe_layer.ExpertsInterface, plugin.GroupedExperts),
    (moe_layer.RouterInterface, plugin.Router),
]


def ids(pairs):
    return [f"{theirs.__name__}-{ours.__name__}" for theirs, ours in pairs]


def parameters(function):
    kinds = inspect.Parameter
    skip = (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self" and p.kind not in skip]


def call_as(protocol_function, target) -> None:
    """Bind a call made the way the protocol says to the target's signature; TypeError when it does not fit."""
    positional, named = [], {}
    for parameter in parameters(protocol_function):
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(object())
        else:
            named[parameter.name] = object()
    inspect.signature(target).bind(*positional, **named)


@pytest.mark.parametrize(("protocol", "module"), PROTOCOLS, ids=ids(PROTOCOLS))
def test_constructors_take_what_megatrons_builders_pass(protocol, module):
    call_as(protocol.__call__, module)
    known = {p.name for p in parameters(module.__init__)}
    named = {p.name for p in parameters(protocol.__call__) if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    if module is not plugin.Router:  # Megatron's own class
        assert named <= known, f"megatron-core passes {named - known}, which {module.__name__} does not know"


@pytest.mark.parametrize(("protocol", "module"), INTERFACES, ids=ids(INTERFACES))
def test_methods_take_what_megatrons_interfaces_call(protocol, module):
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            ours = getattr(module, name)
            positional = [object() for p in parameters(member) if p.kind is not inspect.Parameter.KEYWORD_ONLY]
            named = {p.name: object() for p in parameters(member) if p.kind is inspect.Parameter.KEYWORD_ONLY}
            inspect.signature(ours).bind(None, *positional, **named)


def calls_of(source_module, attribute: str) -> list[set[str]]:
    """The keyword names of every call `submodules.<attribute>(...)` in a Megatron source file."""
    tree = ast.parse(Path(inspect.getsourcefile(source_module)).read_text())
    return [{k.arg for k in node.keywords if k.arg} for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == attribute
            and isinstance(node.func.value, ast.Name) and node.func.value.id == "submodules"]


@pytest.mark.parametrize(("source", "attribute", "module"), [
    (attention, "linear_qkv", plugin.ColumnParallelLinear),
    (attention, "linear_proj", plugin.RowParallelLinear),
    (attention, "core_attention", plugin.CoreAttention),
    (attention, "linear_qkv", plugin.LayerNormColumnParallelLinear),
    (mlp, "linear_fc1", plugin.ColumnParallelLinear),
    (mlp, "linear_fc1", plugin.LayerNormColumnParallelLinear),
    (mlp, "linear_fc2", plugin.RowParallelLinear),
])
def test_the_real_call_sites_pass_only_arguments_the_modules_know(source, attribute, module):
    """Protocols can lag behind the code, so the calls themselves are read too."""
    calls = calls_of(source, attribute)
    known = {p.name for p in parameters(module.__init__)}
    assert calls, f"{source.__name__} no longer calls submodules.{attribute}"
    for names in calls:
        assert names <= known, f"megatron-core passes {names - known}"


def test_the_mlp_takes_what_megatrons_mlp_takes():
    assert inspect.signature(plugin.GatedMLP.__init__) == inspect.signature(mlp.MLP.__init__)
    assert inspect.signature(plugin.GatedMLP.forward) == inspect.signature(mlp.MLP.forward)
    tree = ast.parse(Path(inspect.getsourcefile(transformer_layer)).read_text())
    built = [{k.arg for k in node.keywords} for node in ast.walk(tree) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Attribute) and node.func.attr == "mlp" and isinstance(node.func.value, ast.Name)]
    known = {p.name for p in parameters(mlp.MLP.as_mlp_submodule)}
    assert built and all(names <= known for names in built), built


def test_the_provider_answers_every_question_of_the_protocol():
    ours = plugin.PluginSpecProvider
    for name, member in vars(BackendSpecProvider).items():
        if inspect.isfunction(member) and getattr(member, "__isabstractmethod__", False):
            assert name in vars(ours), f"BackendSpecProvider asks {name}, and the plugin has no answer of its own"
            theirs = [p.name for p in parameters(member)]
            assert [p.name for p in parameters(vars(ours)[name])][:len(theirs)] == theirs


def test_packed_parameters_still_have_the_fields_that_are_read():
    fields = set(PackedSeqParams.__dataclass_fields__)
    assert {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded",
            "local_cp_size"} <= fields


def test_an_argument_from_a_newer_megatron_is_refused_when_it_asks_for_something():
    config = type("Config", (), {"normalization": "RMSNorm", "use_cpu_initialization": True, "params_dtype": torch.float32,
                                 "perform_initialization": False, "sequence_parallel": False})()
    plugin.RMSNorm(config=config, hidden_size=8, new_option=None)
    with pytest.raises(ValueError, match="new_option=True"):
        plugin.RMSNorm(config=config, hidden_size=8, new_option=True)


def test_transformer_engine_is_neither_installed_nor_imported():
    """With it installed, Megatron's HAVE_TE paths switch on and what is tested here is another program."""
    assert "transformer_engine" not in sys.modules
    with pytest.raises(ImportError):
        import transformer_engine  # noqa: F401


def test_the_plugin_never_names_transformer_engine_in_an_import():
    for path in Path(plugin.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", None) or ""
            assert not any("transformer_engine" in name for name in [module, *names]), path


def test_only_the_supported_megatron_series_is_accepted(monkeypatch):
    import importlib

    monkeypatch.setattr(megatron.core, "__version__", "0.20.0")
    with pytest.raises(ImportError, match="megatron-core 0.19.x, and 0.20.0"):
        importlib.reload(plugin)
    monkeypatch.undo()
    importlib.reload(plugin)
