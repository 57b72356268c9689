"""Run by test_sharding.py in a process of its own: quantisation and linear layers over four host devices.

Prints one JSON object: name -> [bits equal to one device, all-gathers in the compiled program].
"""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_plugin.jax import linear, quantize

mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)


def bits(tree):
    return [np.asarray(x).reshape(-1).view(np.uint8) for x in jax.tree.leaves(tree)]


def compare(function, arrays, specs):
    want = jax.jit(function)(*arrays)
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s))) for x, s in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function).lower(*placed).compile()
    got = compiled(*placed)
    same = all(np.array_equal(a, b) for a, b in zip(bits(got), bits(want), strict=True))
    return same, len(re.findall(r"all-gather(?:-start)?\(", compiled.as_text())), got, want


found = {}
x = jnp.asarray((rng.standard_normal((512, 512)) * np.exp(rng.standard_normal((512, 1)) * 3)).astype(np.float32))
for granularity, transpose in itertools.product(("tensor", "row", "block_1x128", "block_128x128", "mx"), (False, True)):
    for spec in (("fsdp", "tensor"), (("fsdp", "tensor"), None)):

        def cast(x, granularity=granularity, transpose=transpose):
            return quantize(x, "e4m3", granularity, transpose=transpose)

        found[f"quantize {granularity} {transpose} {spec}"] = list(compare(cast, [x], [spec])[:2])

# A dimension of exactly one block, and one that no split leaves whole blocks of: gathered if it must be, never wrong.
for shape, spec in (
    ((512, 128), ("fsdp", None)),
    ((128, 256), (None, "tensor")),
    ((128, 128), ("fsdp", None)),
    ((96, 160), ("fsdp", "tensor")),
):
    for granularity in ("row", "block_1x128", "block_128x128", "mx"):

        def cast(x, granularity=granularity):
            return quantize(x, "e4m3", granularity, transpose=True)

        found[f"odd {granularity} {shape}"] = [compare(cast, [x[: shape[0], : shape[1]]], [spec])[0], 0]

w, dy = (jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in ((512, 256), (512, 256)))


def layer(x, w, dy):
    y, pull = jax.vjp(lambda x, w: linear(x, w, precision="fp8_current", layout="kn"), x, w)
    return y, *pull(dy)


_, _, got, want = compare(layer, [x, w, dy], [("fsdp", None), (None, "tensor"), ("fsdp", "tensor")])
found["linear"] = [
    max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(map(np.asarray, got), map(np.asarray, want), strict=True)
    ),
    0,
]
print(json.dumps(found))
