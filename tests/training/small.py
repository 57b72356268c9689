"""Small real runs: a two-layer llama through megatron-core on the built-in corpus, a few milliseconds a step."""

from te_plugin.config import compose

SMALL = [
    "recipe=llama_tiny",
    "run.device=cpu",
    "run.threads=1",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=32",
    "model.ffn_hidden_size=128",
    "data.seq_len=128",
    "schedule.tokens=5120",
    "schedule.global_rows=4",
    "schedule.micro_rows=2",
    "schedule.warmup_tokens=512",
    "schedule.eval_interval=5",
    "schedule.eval_rows=4",
    "schedule.checkpoint_interval=4",
    "check.mode=off",
    "track=jsonl",
]


def small_config(*overrides: str):
    """10 steps of 4 rows of 128 bytes."""
    given = {override.partition("=")[0] for override in overrides}
    return compose([*(o for o in SMALL if o.partition("=")[0] not in given), *overrides])
