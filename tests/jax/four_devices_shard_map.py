"""Run by test_sharding.py in a process of its own: gradients inside jax.shard_map (check_vma) over four host devices.

Prints one JSON object: name -> largest difference to one device, relative to the largest number.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from te_plugin.jax import attention, cross_entropy, grouped_linear, linear, rms_norm, rope, swiglu

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
DATA, ALL = PartitionSpec("data"), PartitionSpec()


def array(*shape):
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


def difference(got, want) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def compare(function, arrays, specs):
    """Gradients of sum(function^2), taken inside shard_map and through it, beside those of one device."""
    loss = lambda *arrays: (function(*arrays).astype(jnp.float32) ** 2).sum()
    every = tuple(range(len(arrays)))
    want = jax.grad(loss, every)(*arrays)
    inside = jax.shard_map(jax.grad(loss, every), mesh=mesh, in_specs=specs, out_specs=specs)
    total = jax.shard_map(lambda *arrays: jax.lax.psum(loss(*arrays), "data"), mesh=mesh, in_specs=specs, out_specs=ALL)
    through = jax.grad(total, every)
    return max(difference(jax.jit(inside)(*arrays), want), difference(through(*arrays), want))


x, w = array(64, 128), array(128, 128)
experts, sizes = array(2, 128, 128), jnp.array([10, 6], jnp.int32)
q, k, v = array(64, 4, 16), array(64, 2, 16), array(64, 2, 16)
cu = jnp.array([0, 5, 16], jnp.int32)  # of each device's rows
whole = jnp.concatenate([jnp.zeros(1, jnp.int32), *(start + cu[1:] for start in range(0, 64, 16))])
alone = lambda q: q.shape[0] == 64


def grouped(x, w, precision):
    """Each device's rows are grouped for themselves; alone, the same rows in one call after another."""
    parts = jnp.split(x, 4) if alone(x) else [x]
    return jnp.concatenate([grouped_linear(part, w, sizes, precision) for part in parts])


found = {}
for name in ("fp32", "mxfp8"):  # scales of mxfp8 do not span devices
    found[f"linear {name}"] = compare(lambda x, w, name=name: linear(x, w, precision=name), (x, w), (DATA, ALL))
    found[f"linear kn {name}"] = compare(
        lambda x, w, name=name: linear(x, w, precision=name, layout="kn"), (x, w), (DATA, ALL)
    )
    found[f"linear with a split weight {name}"] = compare(
        lambda x, w, name=name: linear(x, w, precision=name), (x, w), (ALL, DATA)
    )
for name in ("fp32", "mxfp8", "fp8_rowwise", "fp8_current"):
    found[f"grouped {name}"] = compare(lambda x, w, name=name: grouped(x, w, name), (x, experts), (DATA, ALL))
found["linear and bias"] = compare(linear, (x, w, array(128)), (DATA, ALL, ALL))
found["rms_norm"] = compare(rms_norm, (x, array(128)), (DATA, ALL))
found["swiglu"] = compare(swiglu, (x,), (DATA,))
found["cross_entropy"] = compare(lambda x: cross_entropy(x, jnp.arange(x.shape[0]) % 16), (x,), (DATA,))
found["rope"] = compare(lambda x: rope(x, jnp.arange(x.shape[0]) % 16, inv_freq=jnp.ones(8)), (q,), (DATA,))
found["attention"] = compare(
    lambda q, k, v: attention(q, k, v, cu_seqlens_q=whole if alone(q) else cu), (q, k, v), (DATA,) * 3
)

# A scan's carry keeps its type only where a result varies as its input does.
step = lambda carry, _: (linear(carry, w, precision="mxfp8"), None)
many = jax.shard_map(lambda x: jax.lax.scan(step, x, None, length=2)[0], mesh=mesh, in_specs=DATA, out_specs=DATA)
found["scan"] = difference(many(x), linear(linear(x, w, precision="mxfp8"), w, precision="mxfp8"))

# What the devices share of a step's numbers: the largest amax, all non-finite values.
spoilt = x.at[3, 3].set(jnp.inf).at[60, 3].set(jnp.nan)
numbers = lambda x, w, stats: jax.grad(lambda s: linear(x, w, precision="fp8_current", stats=s).sum())(stats)
split = jax.shard_map(numbers, mesh=mesh, in_specs=(DATA, ALL, ALL), out_specs=ALL)
stats = jnp.zeros((3, 2))
one, four = numbers(spoilt, w, stats), split(spoilt, w, stats)
clean = difference(split(x, w, stats)[:, 0], numbers(x, w, stats)[:, 0])
found["amaxes"] = clean
found["non-finite values"] = float(abs(one[0, 1] - 2) + abs(four[0, 1] - 2))
print(json.dumps(found))
