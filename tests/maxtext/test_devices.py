"""Four host devices, fsdp 2 x tensor 2: the loss of one device, and attention that runs where its rows and heads lie."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("precision", ["fp32"])
def test_four_devices_give_the_loss_of_one_and_gather_no_q_k_or_v(precision):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
                   "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}  # fmt: skip
    command = [sys.executable, str(HERE / "four_devices.py"), precision]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(found)
    np.testing.assert_allclose(found["four"], found["one"], rtol=1e-5)
    assert found["calls"] >= 2, "forward and backward are in the program"
    assert found["control"], "the search finds what an opaque call gathers"
    assert found["gathered"] == []
    for kv_heads in (1, 2, 8):
        assert found[f"{kv_heads} kv heads"] < 1e-4, "every device takes the kv head that its query heads belong to"
