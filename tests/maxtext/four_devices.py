"""Run by test_devices.py in a process of its own: fsdp 2 x tensor 2 against one device. Prints one JSON object."""

import json
import re
import sys

import jax
import jax.numpy as jnp
from small import batches, config

from te_plugin.jax import attention_by_segment_ids
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
print(json.dumps(found))
