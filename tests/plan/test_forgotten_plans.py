"""A launch asks the registry as it is now: a kernel that was taken out does not run from a cache of a framework's layer."""

import pytest
import torch

import te_plugin.torch as tp
from te_plugin.plan import register, registered, unregister
from te_plugin.torch import launches
from te_plugin.torch.fused_quantize import fused_options, norm_quantize, swiglu_quantize
from te_plugin.torch.quantize import QuantizeOptions

X = torch.randn(16, 32)
POSITIONS = torch.arange(16, dtype=torch.int32)
CU = torch.tensor([0, 16], dtype=torch.int32)
CALLS = {
    "attention": lambda: tp.attention(*[X.view(16, 2, 16)] * 3, cu_seqlens_q=CU),
    "norm": lambda: tp.rms_norm(X, torch.ones(32)),
    "qkv_rope": lambda: tp.qkv_rope(X, POSITIONS, heads=2, kv_heads=1, inv_freq=torch.ones(4)),
    "qkv_rope_quantize": lambda: tp.qkv_rope_quantize(X, POSITIONS, heads=2, kv_heads=1, inv_freq=torch.ones(4)),
    "quantize": lambda: tp.quantize(X),
    "quantize_many": lambda: tp.quantize_many([X]),
    "grouped_gemm": lambda: tp.grouped_linear(X, torch.randn(1, 32, 32), torch.tensor([16]), "fp32"),
    "norm_quantize": lambda: norm_quantize(X, torch.ones(32), fused_options(QuantizeOptions())),
    "activation_quantize": lambda: swiglu_quantize(X, fused_options(QuantizeOptions())),
}


@pytest.mark.parametrize("op", CALLS)
def test_a_kernel_that_is_taken_out_runs_no_more(op):
    CALLS[op]()
    before = registered(op)
    launches.reset()
    CALLS[op]()
    (used,) = {row["kernel"] for row in launches.snapshot() if row["op"] == op}
    unregister(op, used)
    launches.reset()
    try:
        try:
            CALLS[op]()
        except ValueError as error:
            assert "no kernel can run this" in str(error)
        assert used not in {row["kernel"] for row in launches.snapshot() if row["op"] == op}
    finally:
        for kernel in registered(op):
            unregister(op, kernel.name)
        for kernel in before:
            register(kernel)
