"""JAX's FP8 products on sm90: what the kernel is handed, on one device and sharded over four. No GPU: see stand_in.py."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin import oracle
from te_plugin.jax import gemm, linear
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import PlanError, Target, plan

from . import stand_in
from .test_linear import relative
from .test_sharding import run_on_four_devices

HERE = Path(__file__).parent


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("precision", ["fp8_current", "fp8_rowwise", "fp8_block"])
def test_the_kernel_is_handed_what_it_asks_for_and_the_results_are_the_oracles(precision, layout, rng, monkeypatch):
    monkeypatch.setattr(gemm, "target_of_backend", lambda: Target("sm90", "jax"))
    monkeypatch.setattr(gemm, "_run", stand_in.run)
    jax.clear_caches()  # what the kernel is asked is seen while tracing
    stand_in.calls.clear()
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, 256), (128, 256), (96, 128)))
    weight = w if layout == "nk" else np.ascontiguousarray(w.T)
    y, pull = jax.vjp(lambda x, w: linear(x, w, precision=precision, layout=layout), x, weight)
    dx, dw = pull(jnp.asarray(dy))
    assert relative(y, oracle.linear(x, w, precision=precision)) < 1e-5
    assert relative(dx, oracle.linear_dgrad(dy, w, precision)) < 1e-5
    assert relative(dw if layout == "nk" else dw.T, oracle.linear_wgrad(dy, x, precision)) < 1e-5
    asked = {(p.m, p.n, p.k) for p in stand_in.calls}
    # dy is E5M2 under fp8_current, which the kernel takes first: the gradient of a [K,N] weight is turned then.
    wgrad = {(128, 256, 96)} if layout == "nk" or precision == "fp8_current" else {(256, 128, 96)}
    assert asked == {(96, 128, 256), (96, 256, 128)} | wgrad


def test_sharded_products_stay_split_and_add_up():
    found = run_on_four_devices(HERE / "four_devices_sm90.py")
    assert len(found) == 9
    wrong = {name: worst for name, (worst, _) in found.items() if not worst < 1e-5}
    assert not wrong
    # 512 rows over fsdp: y and dx on 256 rows each, dW summed over 256 rows a device and then over the devices, in FP32.
    local = found["512 512 1024 fp8_block nk fsdp"][1]
    assert [256, 512, 1024, "fp32"] in local and [256, 1024, 512, "fp32"] in local and [512, 1024, 256, "fp32"] in local
    # Column parallel: 256 of the 512 out features a device; dx sums over its share of them.
    local = found["512 512 1024 fp8_block nk column"][1]
    assert [256, 256, 1024, "fp32"] in local and [256, 1024, 256, "fp32"] in local
    # Row parallel: the forward sums over 512 of the 1024 in features.
    assert [256, 512, 512, "fp32"] in found["512 512 1024 fp8_block nk row"][1]


def test_what_sm90_does_not_multiply_goes_to_xla_or_is_refused():
    ours, jax_on_hopper = GemmProblem(64, 64, 64, "e4m3", "e4m3", "tensor", "tensor"), Target("sm90", "jax")
    assert plan(ours, jax_on_hopper).kernel.name == "sm90"
    assert plan(GemmProblem(64, 64, 64, "e4m3", "e5m2", "tensor", "tensor"), jax_on_hopper).kernel.name == "xla"
    assert plan(GemmProblem(64, 64, 64), jax_on_hopper).kernel.name == "xla"
    with pytest.raises(PlanError, match="writes bf16 or fp32, not fp16"):
        plan(GemmProblem(64, 64, 64, "e4m3", "e4m3", "row", "row", "fp16"), jax_on_hopper)
