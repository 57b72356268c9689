"""A small packed llama, built by MaxText, for the tests that compile one."""

from te_plugin.config import compose
from te_plugin.data import build_data
from te_plugin.maxtext.model import TrainedModel

SIZES = ["model.hidden_size=128", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=32",
         "model.ffn_hidden_size=256", "data.seq_len=256", "schedule.tokens=20480", "schedule.warmup_tokens=1024",
         "schedule.global_rows=4", "schedule.micro_rows=4", "track=jsonl", "check.mode=off"]  # fmt: skip


def config(*overrides: str):
    return compose(["recipe=llama_tiny", "adapter=maxtext", *SIZES, *overrides], for_run=False)


def batches(cfg, count: int, rows: int) -> list:
    data = build_data(cfg)
    return [data.train_batch(number * rows, rows) for number in range(count)]


def losses(cfg, rows: list, devices=None, **overrides) -> list[float]:
    """The loss of one optimizer step a batch, from the run's initial weights."""
    model = TrainedModel(cfg, lambda done: 1e-3, devices, **overrides)
    model.initialise()
    return [float(model.step(model.batch([batch]))["loss"]) for batch in rows]
