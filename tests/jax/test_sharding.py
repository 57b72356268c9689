"""Sharded arrays: the compiled quantisation is split by our rule, not gathered, and gives the bits of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
