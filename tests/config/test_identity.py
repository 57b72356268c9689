"""The recipe hash: what must change it, and what must not."""

import pytest

from te_plugin.config import compose, differences, recipe_hash


def tiny(*overrides: str):
    return compose(["recipe=llama_tiny", *overrides], for_run=False)


@pytest.mark.parametrize("override", [
    "optim.lr=4e-3", "precision=bf16", "layout=bshd", "attention=dq_bf16", "parallel=fsdp2", "track=jsonl", "track.run_name=x",
    "check.mode=off", "run.threads=1", "run.dir=/tmp/x", "run.device=cpu", "testing.sabotage=no_document_mask",
    "schedule.eval_interval=7", "schedule.eval_rows=2", "schedule.checkpoint_interval=7", "schedule.stop_after_steps=3",
    "schedule.keep_checkpoints=1", "schedule.micro_rows=1", "precision.bf16_layers_at_start=1",
])
def test_what_may_not_move_the_curve_keeps_the_hash(override):
    """A doubled learning rate keeps it on purpose: such a run is still held against the golden curve, and fails."""
    assert recipe_hash(tiny(override)) == recipe_hash(tiny())


@pytest.mark.parametrize("override", [
    "model.num_layers=3", "model.rope_theta=5e5", "model.rope_scaling.factor=2", "data.seq_len=512", "data.seed=1",
    "data.shuffle=false", "data=synthetic", "optim.beta2=0.99", "optim.eps=1e-6", "optim.weight_decay=0", "optim.clip_grad=2",
    "schedule.tokens=400000", "schedule.global_rows=4", "schedule.warmup_tokens=0", "schedule.min_lr_ratio=0.5", "run.seed=7",
    "run.init_from=/some/checkpoint",
])
def test_what_moves_the_curve_changes_the_hash(override):
    assert recipe_hash(tiny(override)) != recipe_hash(tiny())


def test_differences_name_both_values():
    assert differences(tiny(), tiny("optim.lr=4e-3", "layout=bshd")) == {
        "layout.name": ("thd", "bshd"), "optim.lr": (tiny().optim.lr, 4e-3)}
    assert differences(tiny(), tiny()) == {}
