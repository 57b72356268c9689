"""Run by test_sm90_gemm.py in a process of its own: FP8 linear layers on the sm90 call path, sharded over four host devices.

Prints one JSON object: name -> [largest difference to one device relative to the largest value, local problems].
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from stand_in import calls, install

from te_plugin.jax import linear

install()
mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
found = {}
SPECS = {
    "fsdp": (("fsdp", None), ("fsdp", None), ("fsdp", None)),
    "column": (("fsdp", None), ("tensor", None), ("fsdp", "tensor")),
    "row": (("fsdp", "tensor"), (None, "tensor"), ("fsdp", None)),
    "rows over all": ((("fsdp", "tensor"), None), ("fsdp", "tensor"), (("fsdp", "tensor"), None)),
}
LARGE, ODD = (512, 512, 1024), (96, 128, 384)  # ODD: N is one block, K three, and neither half of the rows a multiple of 64
CASES = [(LARGE, "fp8_block", "nk", name) for name in SPECS]
CASES += [(LARGE, "fp8_rowwise", "nk", "row"), (LARGE, "fp8_current", "kn", "column"), (LARGE, "fp8_block", "kn", "fsdp")]
CASES += [(ODD, "fp8_block", "nk", "row"), (ODD, "fp8_rowwise", "kn", "column")]
for (m, n, k), precision, layout, name in CASES:
    specs = SPECS[name]
    shapes = ((m, k), (n, k), (m, n))
    x, w, dy = (jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    turn = (lambda w: w) if layout == "nk" else (lambda w: w.T)

    def layer(x, w, dy, precision=precision, layout=layout, turn=turn):
        y, pull = jax.vjp(lambda x, w: linear(x, turn(w), precision=precision, layout=layout), x, w)
        return y, *pull(dy)

    want = jax.jit(layer)(x, w, dy)
    placed = [jax.device_put(t, NamedSharding(mesh, PartitionSpec(*s))) for t, s in zip((x, w, dy), specs, strict=True)]
    jax.clear_caches()  # what the kernel is asked is seen while tracing
    calls.clear()
    got = jax.jit(layer)(*placed)
    worst = max(float(jnp.abs(jax.device_get(a) - b).max() / jnp.abs(b).max()) for a, b in zip(got, want, strict=True))
    local = [[p.m, p.n, p.k, p.out_dtype] for p in calls]
    found[f"{m} {n} {k} {precision} {layout} {name}"] = [worst, local]
print(json.dumps(found))
