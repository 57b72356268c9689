"""What cannot be run is refused before anything is allocated: one table of requests and of what the message must name."""

import pytest

from te_plugin import PlanError
from te_plugin.config import ConfigError, compose, load, target_arch, to_yaml, validate
from te_plugin.config.ranges import CHOICES, LIMITS
from te_plugin.config.rules import RULES, RUN_RULES


def refusal(*overrides: str, for_run: bool = False, recipe: str = "llama_tiny") -> str:
    with pytest.raises(ConfigError) as caught:
        compose([f"recipe={recipe}", *overrides], for_run=for_run)
    return str(caught.value)


def tiny(*overrides: str):
    return compose(["recipe=llama_tiny", *overrides], for_run=False)


# overrides -> words that the message must hold: both sides of the conflict, and what to change
REFUSED = [
    ("model.num_heads=3 model.num_kv_heads=2", ["model.num_heads=3", "model.num_kv_heads=2", "multiple"]),
    ("model.head_dim=127 precision=bf16", ["model.head_dim=127", "even"]),
    ("model.rope_scaling.factor=8 model.rope_scaling.high_freq_factor=1", ["high_freq_factor=1.0", "low_freq_factor=1.0"]),
    ("model.ffn_hidden_size=767", ["fp8_current", "model.ffn_hidden_size is 767", "16"]),
    ("model.ffn_hidden_size=768 precision=fp8_block model.hidden_size=320", ["fp8_block", "model.hidden_size is 320", "128"]),
    ("precision=mxfp8 model.ffn_hidden_size=752", ["mxfp8", "model.ffn_hidden_size is 752", "32"]),
    # https://github.com/hydra-ecosystem/hydra/issues/1647 (a ~ after "=" stays a ~), https://github.com/ulyssa/iamb/issues/244
    ("run.dir=~/runs/a", ["run.dir=~/runs/a", "after '='", "$HOME"]),
    ("precision.bf16_layers_at_start=3 precision.bf16_layers_at_end=2", ["is 5", "4 layers"]),
    ("precision=bf16 precision.weight_cache=none", ["precision.weight_cache=none would be ignored", "FP8"]),
    ("precision=bf16 precision.fuse=false", ["precision.fuse=False would be ignored", "FP8 precisions"]),
    ("adapter=maxtext precision.fuse=false", ["precision.fuse=False would be ignored", "adapter=megatron"]),
    ("precision.amax_history_len=16", ["amax_history_len=16 would be ignored", "fp8_delayed"]),
    ("precision=fp8_delayed precision.pow2_scale=true", ["pow2_scale=True would be ignored", "fp8_current"]),
    *((f"precision={name} precision.forward_accumulation=fast",
       ["precision.forward_accumulation=fast", f"precision={name}", why, "fp8_current, fp8_delayed, fp8_rowwise"])
      for name, why in (("bf16", "only FP8"), ("fp32", "only FP8"), ("fp8_block", "added in FP32"), ("mxfp8", "added in FP32"))),
    ("adapter=maxtext precision.forward_accumulation=fast", ["forward_accumulation=fast", "adapter=maxtext", "XLA decides"]),
    ("moe=tiny precision.forward_accumulation=fast", ["forward_accumulation=fast", "moe.num_experts=4", "add in FP32"]),
    ("moe.top_k=1", ["moe.top_k=1 would be ignored", "num_experts"]),
    ("moe=tiny moe.top_k=5", ["moe.top_k=5", "num_experts=4"]),
    ("moe=tiny moe.ffn_hidden_size=0", ["moe.ffn_hidden_size"]),
    ("adapter=maxtext layout=bshd", ["adapter=maxtext", "layout=bshd", "layout=thd"]),
    ("adapter=maxtext attention.window_left=128", ["window_left=128", "adapter=maxtext", "sliding windows"]),
    ("adapter=maxtext precision.weight_cache=none", ["weight_cache=none", "adapter=maxtext"]),
    ("adapter=maxtext precision.bf16_layers_at_start=1", ["bf16_layers_at_start", "adapter=maxtext"]),
    ("adapter=maxtext parallel.grad_accum_fusion=true", ["grad_accum_fusion", "adapter=maxtext"]),
    ("adapter=maxtext moe=tiny moe.aux_loss_coeff=0 precision=mxfp8 moe.ffn_hidden_size=256",
     ["mxfp8", "experts", "fp8_current"]),
    ("adapter=maxtext moe=tiny moe.aux_loss_coeff=0.1", ["aux_loss_coeff=0.1", "adapter=maxtext"]),
    ("adapter=maxtext moe=tiny moe.aux_loss_coeff=0 moe.grouped_gemm=false", ["grouped_gemm=false", "adapter=maxtext"]),
    ("adapter=maxtext run.threads=1", ["run.threads=1", "adapter=maxtext", "taskset"]),
    ("adapter=maxtext run.init_from=.", ["run.init_from", "adapter=megatron"]),
    ("adapter=maxtext testing.sabotage=dq_slot0", ["dq_slot0", "adapter=maxtext"]),
    ("adapter=maxtext check.mode=record check.reason=x", ["check.mode=record", "adapter=megatron"]),
    ("adapter=maxtext model.rope_scaling.factor=4", ["rope_scaling", "adapter=maxtext"]),
    ("parallel.context_parallel=2", ["context_parallel=2", "layout=thd", "context_parallel=1"]),
    ("parallel.pipeline_parallel=2", ["pipeline_parallel=2", "set parallel.pipeline_parallel=1"]),
    ("parallel.expert_parallel=2", ["expert_parallel=2", "set parallel.expert_parallel=1"]),
    ("parallel.sequence_parallel=true", ["sequence_parallel=true", "tensor_parallel is 1"]),
    ("parallel.tensor_parallel=2", ["tensor_parallel=2", "parallel=single", "use parallel=ddp"]),
    ("parallel=fsdp2 parallel.tensor_parallel=2", ["tensor_parallel=2", "parallel=fsdp2", "use parallel=ddp"]),
    ("parallel=ddp parallel.tensor_parallel=4", ["model.num_heads=2", "tensor_parallel=4"]),
    ("parallel=fsdp2 parallel.grad_accum_fusion=true", ["parallel=fsdp2", "grad_accum_fusion=true", "grad_accum_fusion=false"]),
    ("parallel=fsdp2 precision.keep_transpose=true", ["parallel=fsdp2", "keep_transpose=true", "keep_transpose=false"]),
    ("schedule.global_rows=3", ["global_rows=3", "micro_rows=2"]),
    ("schedule.tokens=1000 schedule.warmup_tokens=0", ["schedule.tokens=1000", "2048"]),
    ("schedule.warmup_tokens=327680", ["warmup_tokens=327680", "tokens=327680"]),
    ("schedule.tokens=6143 schedule.warmup_tokens=4096", ["warmup_tokens=4096", "4096 tokens of the run's whole steps"]),
    ("model.vocab_size=256", ["data.tokenizer=bytes", "384", "model.vocab_size=256"]),
    ("data.tokenizer=llama3", ["data.tokenizer=llama3", "128256", "model.vocab_size=384"]),
    ("data.tokenizer=hf", ["data.tokenizer_path=FOLDER"]),
    ("data.path=/somewhere", ["data.path=/somewhere would be ignored"]),
    ("data.text_field=body", ["data.text_field=body would be ignored", "jsonl"]),
    ("check.mode=record", ["check.mode=record", "check.reason"]),
    ("check.reason=why", ["check.reason=why would be ignored", "check.mode=record"]),
    ("check.mode=record check.reason=x testing.sabotage=no_document_mask", ["check.mode=record", "sabotage=no_document_mask"]),
    ("check.mode=record check.reason=x schedule.stop_after_steps=5", ["check.mode=record", "stop_after_steps"]),
    ("track=jsonl track.entity=me", ["track.entity=me would be ignored"]),
    ("run.resume=true", ["run.resume=true", "run.dir"]),
    ("precision=bf16 run.tune=true run.device=cuda", ["run.tune=True", "FP8 runs on a GPU"]),
    ("precision=fp8_current run.tune=true run.device=cpu", ["run.tune=True", "FP8 runs on a GPU"]),
    ("adapter=maxtext precision=fp8_current run.tune=true", ["run.tune=True", "adapter=megatron"]),
    ("run.device=cpu run.target=sm90", ["run.device=cpu", "run.target=sm90"]),
    ("testing.sabotage=no_document_mask layout=bshd", ["no_document_mask", "layout=thd"]),
    ("testing.sabotage=everything", ["testing.sabotage=everything does not exist", "no_document_mask"]),
]


@pytest.mark.report("AI-Hypercomputer/maxtext#2906")
@pytest.mark.parametrize("overrides,words", REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_a_pair_that_cannot_be_is_refused_naming_both_sides(overrides, words):
    message = refusal(*overrides.split())
    assert all(word in message for word in words), message
    assert "\n" not in message, "one conflict, one sentence"


@pytest.mark.report("NVIDIA/TransformerEngine#2698")
def test_fsdp2_with_fused_weight_gradients_is_refused_before_step_1():
    message = refusal("parallel=fsdp2", "parallel.grad_accum_fusion=true")
    assert "parallel=fsdp2" in message and "grad_accum_fusion=true" in message
    assert tiny("parallel=ddp", "parallel.grad_accum_fusion=true").parallel.grad_accum_fusion


@pytest.mark.parametrize("key", sorted(LIMITS))
def test_every_limited_number_refuses_the_first_value_below_its_limit(key):
    low, _, low_allowed, _ = LIMITS[key]
    message = refusal(f"{key}={low - 1 if low_allowed else low}")
    assert f"{key}={low - 1 if low_allowed else low}" in message.replace(".0 ", " ") and "out of range" in message


@pytest.mark.parametrize("key", sorted(key for key, limit in LIMITS.items() if limit[1] is not None))
def test_every_number_with_an_upper_limit_refuses_what_is_above(key):
    above = LIMITS[key][1] + 1
    message = refusal(f"{key}={above}").replace(".0 ", " ")
    assert f"{key}={above} is out of range" in message and f"{LIMITS[key][1]}" in message


@pytest.mark.parametrize("key", sorted(key for key in CHOICES if not key.endswith(".name")))
def test_every_named_choice_lists_the_names(key):
    message = refusal(f"{key}=nonsense")
    assert f"{key}=nonsense does not exist" in message and all(choice in message for choice in CHOICES[key])


def test_several_conflicts_are_listed_together():
    message = refusal("parallel.context_parallel=2", "schedule.global_rows=3")
    assert message.count("\n- ") == 2


def test_validate_refuses_a_loaded_file_as_compose_does(tmp_path):
    path = tmp_path / "config.resolved.yaml"
    path.write_text(to_yaml(tiny()).replace("num_kv_heads: 1", "num_kv_heads: 3"))
    with pytest.raises(ConfigError, match="num_kv_heads=3"):
        validate(load(path), for_run=False)


@pytest.mark.parametrize("overrides,world,words", [
    ((), 2, ["parallel=single", "2 processes"]),
    (("parallel=ddp",), 2, ["global_rows=2", "micro_rows=2", "2 data-parallel processes"]),
    (("parallel=ddp", "parallel.tensor_parallel=2"), 3, ["3 processes", "tensor_parallel=2"]),
])
def test_a_number_of_processes_that_does_not_fit_is_refused(overrides, world, words):
    with pytest.raises(ConfigError) as caught:
        validate(tiny(*overrides), for_run=False, world_size=world)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("overrides,world", [((), 1), (("parallel=ddp", "schedule.micro_rows=1"), 2),
                                             (("parallel=ddp", "parallel.tensor_parallel=2"), 2),
                                             (("parallel=fsdp2", "schedule.micro_rows=1"), 2)])
def test_a_number_of_processes_that_fits_is_taken(overrides, world):
    validate(tiny(*overrides), for_run=False, world_size=world)


# ---- a run on this machine ----

def test_a_missing_data_path_is_named(tmp_path):
    assert "data=jsonl reads the user's own text; set data.path=PATH" in refusal("data=jsonl", for_run=True)
    nowhere = f"data.path={tmp_path}/none"
    assert f"{nowhere}: no such file or folder" in refusal("data=text", nowhere, for_run=True)
    message = refusal("data=megatron", f"data.path={tmp_path}/corpus", for_run=True)
    assert f"{tmp_path}/corpus.bin and {tmp_path}/corpus.idx not found" in message
    assert "tokenizer_path" in refusal("data.tokenizer=hf", f"data.tokenizer_path={tmp_path}/none", for_run=True)
    assert "run.init_from" in refusal(f"run.init_from={tmp_path}/none", for_run=True)


def test_an_attention_kernel_that_cannot_run_here_is_refused_with_its_reason():
    message = refusal("attention.kernel=sm90", "run.device=cpu", for_run=True)
    assert message.startswith("attention: ") and "sm90" in message
    assert "no kernel is named 'nonsense'" in refusal("attention.kernel=nonsense", "run.device=cpu", for_run=True)


def test_fp8_attention_without_a_kernel_for_it_is_refused_with_every_kernel_and_its_reason():
    message = refusal("attention=fp8", "model.head_dim=320", "run.device=cpu", for_run=True)
    assert "no kernel can run this on cpu" in message and "cpu: " in message and "composite: " in message


def test_fast_accumulation_is_for_runs_on_hopper():
    fast = "precision.forward_accumulation=fast"
    for precision in ("fp8_current", "fp8_delayed", "fp8_rowwise"):
        assert tiny(f"precision={precision}", fast).precision.forward_accumulation == "fast"
    message = refusal(fast, "run.device=cpu", for_run=True)
    assert "no kernel can run this on cpu" in message and "composite: adds in FP32" in message


def test_a_refused_plan_is_a_config_error_that_keeps_the_plans_message():
    from te_plugin.ops.recipe import plan_run

    cfg = tiny("attention=fp8", "model.head_dim=320", "run.device=cpu")
    with pytest.raises(PlanError) as planned:
        plan_run(cfg)
    with pytest.raises(ConfigError) as refused:
        validate(cfg)
    assert str(planned.value) in str(refused.value)


def test_a_target_that_is_not_this_machine_is_for_explain_only():
    assert tiny("run.target=sm90").run.target == "sm90"
    message = refusal("run.target=gfx950", for_run=True)
    assert "run.target=gfx950" in message and "explain" in message


def test_the_target_follows_target_then_device():
    assert target_arch(tiny("run.target=sm90")) == "sm90"
    assert target_arch(tiny("run.device=cpu")) == "cpu"


def test_every_rule_refuses_something(monkeypatch):
    """A rule that the table above never reaches is dead, or untested."""
    monkeypatch.setattr("te_plugin.config.composition.validate", lambda cfg, for_run: None)
    refused = [compose(["recipe=llama_tiny", *overrides.split()]) for overrides, _ in REFUSED]
    reached = {rule.__name__ for rule in RULES if any(list(rule(cfg)) for cfg in refused)}
    assert {rule.__name__ for rule in RULES} == reached
    assert {rule.__name__ for rule in RUN_RULES} == {"_files", "_machine", "_kernels"}
