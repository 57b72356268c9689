"""Run by test_two_ranks.py under torchrun with two processes (gloo): writes what it found as JSON, from rank 0.

Every comparison is with the same model unsplit, built in the same process.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import megatron.core.models.gpt.gpt_model  # noqa: E402, F401
import megatron.core.quantization.quant_config  # noqa: E402, F401
import megatron.core.transformer.moe.moe_layer  # noqa: E402, F401
import torch  # noqa: E402


def callables() -> dict:
    """Identity of every function, class and method of megatron-core."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core") or module is None:
            continue
        for key, value in vars(module).items():
            if callable(value):
                found[name, key] = id(value)
            if isinstance(value, type):
                found.update({(name, key, inner): id(member) for inner, member in vars(value).items() if callable(member)})
    return found


BEFORE = callables()
sys.path.insert(0, str(Path(__file__).parent))
from megatron_models import mean_loss, packed_batch, small_config  # noqa: E402

from te_plugin import megatron as plugin  # noqa: E402
from te_plugin.megatron.arguments import take_shard  # noqa: E402
from te_plugin.training.optimizer import stored_parameters  # noqa: E402

AFTER = callables()
CHANGED = [str(key) for key, identity in BEFORE.items() if AFTER.get(key) != identity]
BATCHES = [packed_batch([30, 21, 12], seed=seed) for seed in range(2)]


def model_of(*overrides: str, device: str = "cpu"):
    cfg = small_config("layout=thd", *overrides)
    plugin.initialize(cfg)
    return plugin.build_gpt(cfg, device)


def train(model, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for step in range(steps):
        loss = mean_loss(model, BATCHES[step % 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tensor_parallel(*overrides: str) -> dict:
    split = model_of("parallel=ddp", "parallel.tensor_parallel=2", *overrides)
    split_losses = train(split)
    rank = torch.distributed.get_rank()
    shards = {name: (p.detach().clone(), getattr(p, "partition_dim", -1), getattr(p, "partition_stride", 1))
              for name, p in split.named_parameters()}
    places = checkpoint_parts(split)
    whole = model_of(*overrides)
    whole_losses = train(whole)
    worst = 0.0
    for name, full in whole.named_parameters():
        shard, dim, stride = shards[name]
        expected = take_shard(full.detach(), dim, stride, rank, 2) if dim >= 0 else full
        worst = max(worst, (expected - shard).abs().max().item())
    fulls = {key: data for (key, _), (_, data) in checkpoint_parts(whole, join=True).items()}
    misplaced = []
    for (key, offset), (shape, data) in places.items():
        full = fulls[key]
        where = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
        if shape != tuple(full.shape) or (full[where] - data).abs().max() > 1e-4:
            misplaced.append(key)
    return {"split": split_losses, "whole": whole_losses, "worst_parameter": worst, "misplaced": misplaced,
            "parts": len(places)}


def fused_and_separate(*overrides: str) -> dict:
    """Losses and weights of both forms of a model on this rank, split over two ranks: they must not differ by a bit."""
    split = ("parallel=ddp", "parallel.tensor_parallel=2", *overrides)
    models = [model_of(*split, f"precision.fuse={fuse}") for fuse in ("true", "false")]
    losses = [train(model) for model in models]
    pairs = zip(*(stored_parameters(model) for model in models), strict=True)
    different = [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]
    return {"fused": losses[0], "separate": losses[1], "different": different,
            "norm": type(models[0].decoder.layers[0].self_attention.linear_qkv).__name__}


def checkpoint_parts(model, join: bool = False) -> dict:
    """(key, offset) -> (global shape, data) of a model's sharded state; join: whole tensors from their parts."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    found = {}
    for value in model.sharded_state_dict(metadata=metadata).values():
        for part in value.build() if isinstance(value, ShardedTensorFactory) else [value]:
            if isinstance(part, ShardedTensor):
                axes = part.prepend_axis_num
                data = part.data.detach().reshape((1,) * axes + tuple(part.data.shape)).clone()
                found[part.key, tuple(part.global_offset)] = (tuple(part.global_shape), data)
    if not join:
        return found
    whole = {}
    for (key, offset), (shape, data) in found.items():
        full = whole.setdefault((key, 0), (shape, torch.zeros(shape)))[1]
        full[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
    return whole


def fully_sharded() -> dict:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    cfg = small_config("layout=thd")
    whole_losses = train(model_of())
    model = plugin.build_gpt(cfg, "meta")
    mesh = init_device_mesh("cpu", (2,))
    for layer in [m for m in model.modules() if isinstance(m, TransformerLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plugin.materialise(model, cfg, "cpu")
    return {"split": train(model), "whole": whole_losses, "sharded": all(hasattr(p, "placements") for p in model.parameters())}


def refusals() -> dict:
    """Messages of what cannot run, by name."""
    said = {}
    for name, overrides in {"indivisible": ("parallel.tensor_parallel=3", "model.num_heads=6", "model.num_kv_heads=3")}.items():
        try:
            cfg = small_config("layout=thd")
            for override in overrides:
                key, value = override.split("=")
                section, field = key.split(".")
                setattr(getattr(cfg, section), field, int(value))
            plugin.initialize(cfg)
            said[name] = None
        except ValueError as error:
            said[name] = str(error)
    return said


def main() -> None:
    torch.set_num_threads(1)
    found = {
        "changed_in_megatron": CHANGED, "callables": len(BEFORE),
        "fp32": tensor_parallel(), "tied": tensor_parallel("model.tie_embeddings=true"),
        "fp8": tensor_parallel("precision=fp8_current"),
        "fused": {name: fused_and_separate(f"precision={name}") for name in ("fp8_current", "fp8_delayed")},
        "fsdp2": fully_sharded(), "refusals": refusals(),
    }
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
