"""Run by test_devices.py in a process of its own: fsdp 2 x tensor 2 against one device. Prints one JSON object."""

import json
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from small import batches, config

from te_plugin.jax import attention_by_segment_ids
from te_plugin.maxtext.attention import _sharded
from te_plugin.maxtext.model import TrainedModel

precision = sys.argv[1]
single, mesh = (
    config(f"precision={precision}"),
    config(f"precision={precision}", "parallel=fsdp2", "parallel.tensor_parallel=2"),
)
rows = batches(single, 3, 4)
found = {}
for name, cfg, devices in (("one", single, jax.devices()[:1]), ("four", mesh, jax.devices())):
    cfg.schedule.micro_rows = 4 if name == "one" else 2
    model = TrainedModel(cfg, lambda done: 1e-3, devices)
    model.initialise()
    found[name] = [float(model.step(model.batch([batch]))["loss"]) for batch in rows]


def gathered(text: str) -> list[str]:
    """Shapes of all-gathers that hold tokens and the head dim: q, k, v and the attention output, and no weight."""
    shapes = re.findall(r"= (\S+) all-gather(?:-start)?\(", text)
    return [shape for shape in shapes if re.search(r"\[(?:\d+,)*(?:256|512|1024)(?:,\d+)*,32\]", shape)]


text = model._compiled.as_text()
found["gathered"], found["calls"] = gathered(text), len(re.findall(r"te_plugin\.cpu\.attention", text))

# The same kernel without shard_map is opaque to XLA: the search above must find what it gathers then.
place = jax.sharding.NamedSharding(model.mesh, jax.sharding.PartitionSpec("fsdp", None, "tensor", None))
q = jax.device_put(jnp.ones((4, 256, 4, 32)), place)
ids = jnp.ones((4, 256), jnp.int32)
opaque = jax.jit(lambda q: attention_by_segment_ids(q, q, q, ids, max_segments=1), in_shardings=place)
found["control"] = gathered(opaque.lower(q).compile().as_text())

# Rules of a user's own may split query heads over more devices than there are kv heads.
tensor = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
op = SimpleNamespace(mesh=tensor, flash_axis_names_q=None, _logical_to_mesh_axes=lambda _: (None, "tensor", None, None))
ids = jnp.asarray([[1] * 9 + [2] * 7, [1] * 5 + [2] * 6 + [0] * 5], jnp.int32)


def gradients(run, *arrays):
    return jax.grad(lambda *qkv: (run(*qkv, ids) ** 2).sum(), (0, 1, 2))(*arrays)


for kv_heads in (1, 2, 8):
    shapes = (2, 16, 8, 16), (2, 16, kv_heads, 16), (2, 16, kv_heads, 16)
    qkv = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    split = gradients(lambda *given: _sharded(op, *given, {"max_segments": 2}), *qkv)
    whole = gradients(lambda *given: attention_by_segment_ids(*given, max_segments=2), *qkv)
    found[f"{kv_heads} kv heads"] = max(float(jnp.abs(a - b).max()) for a, b in zip(split, whole, strict=True))
print(json.dumps(found))
