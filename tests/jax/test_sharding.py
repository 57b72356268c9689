"""Sharded arrays: the compiled quantisation is split by our rule, not gathered, and gives the bits of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from te_plugin.jax import attention, linear, quantize

HERE = Path(__file__).parent


def run_on_four_devices(script: Path, *arguments: str) -> dict:
    """The JSON object that a script prints, run on four host devices of the CPU."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
                   "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_granularity_gives_one_devices_bits_without_a_gather():
    found = run_on_four_devices(HERE / "four_devices.py")
    worst, _ = found.pop("linear")
    assert worst < 1e-5, "sums come in another order, nothing else may differ"
    assert len(found) == 20 + 16
    wrong = {name: result for name, result in found.items() if result != [True, 0]}
    assert not wrong


@pytest.mark.report("NVIDIA/warp#1851", "google-deepmind/mujoco#3426", "jax-ml/jax#29832")
def test_gradients_inside_shard_map_are_those_of_one_device():
    """With check_vma, the default: results carry the axes they vary over, shared weights get the sum over the devices."""
    found = run_on_four_devices(HERE / "four_devices_shard_map.py")
    assert len(found) == 19
    wrong = {name: worst for name, worst in found.items() if not worst < 1e-6}
    assert not wrong


@pytest.mark.parametrize("call", [
    lambda x: linear(x, jnp.ones((128, 128))), lambda x: quantize(x),
    lambda x: attention(x[:, None], x[:, None], x[:, None], cu_seqlens_q=jnp.array([0, 8], jnp.int32))])
def test_explicit_shardings_are_refused_with_the_two_ways_round(call):
    """The ops have no rule for types that name mesh axes; without a word they failed in the backward pass, or in XLA."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(jnp.ones((8, 128)), jax.NamedSharding(mesh, jax.P("data")))
    with pytest.raises(ValueError, match=r"explicit mesh axes.*AxisType.Auto.*jax.shard_map"):
        call(x)
