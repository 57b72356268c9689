"""Every rule that spans two fields. `validate()` applies them all before anything is allocated.

A rule yields one sentence for each thing it refuses: what was asked, why it cannot be, what to change. Whether a kernel can
run is not decided here: the plan is asked for every kernel of the run, and its reason is the message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from te_plugin import numerics
from te_plugin.config import ranges
from te_plugin.config.identity import flatten
from te_plugin.config.schema import Config, ConfigError
from te_plugin.ops.linear_checks import accumulation_reason
from te_plugin.plan import PlanError, detect_target

Rule = Callable[[Config], Iterator[str]]
RULES: list[Rule] = []
RUN_RULES: list[Rule] = []  # asked only where the run will really start: they look at files and at this machine

# Layouts each adapter can feed to its framework's attention.
ADAPTER_LAYOUTS = {"megatron": ("thd", "bshd"), "maxtext": ("thd",)}
VOCAB_NEEDED = {"bytes": 384, "llama3": 128256}  # of the tokenizers whose size is fixed


def validate(cfg: Config, *, for_run: bool = True, world_size: int | None = None) -> None:
    """Refuse what cannot be run. ConfigError lists every reason.

    for_run=False leaves out what belongs to a real run on this machine: the plan of its kernels, files, devices.
    world_size: the number of processes where it is known (the launcher and the workers know it, a recipe does not).
    """
    found = list(ranges.problems(cfg))
    if not found:  # the rules may divide by the sizes
        found = [problem for rule in RULES for problem in rule(cfg)]
        if world_size is not None:
            found += _world(cfg, world_size)
    if not found and for_run:
        found = [problem for rule in RUN_RULES for problem in rule(cfg)]
    if found:
        raise ConfigError(found[0] if len(found) == 1 else "\n".join(["several settings cannot be:", *(f"- {p}" for p in found)]))


def target_arch(cfg: Config) -> str:
    """The architecture that the run's kernels are planned for: run.target, else run.device, else what this machine has."""
    if cfg.run.target != "auto":
        return cfg.run.target
    if cfg.run.device == "cpu":
        return "cpu"
    arch = machine_arch()
    if arch == "cpu" and cfg.run.device == "cuda":
        raise ConfigError("run.device=cuda: torch sees no GPU on this machine; set run.device=cpu to run here, or name the GPU "
                          "to plan for: te-plugin explain ... target=sm90")
    return arch


def machine_arch() -> str:
    """sm90, sm100, ... where torch sees a GPU, else cpu."""
    try:
        import torch  # noqa: F401  (detect_target asks the torch that is imported)
    except ModuleNotFoundError:
        pass
    try:
        return detect_target().arch
    except PlanError as error:
        raise ConfigError(f"run.device=auto: {error}; set run.device=cpu") from error


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def run_rule(function: Rule) -> Rule:
    RUN_RULES.append(function)
    return function


# ---- model and precision ----

@rule
def _heads(cfg: Config) -> Iterator[str]:
    model = cfg.model
    if model.num_heads % model.num_kv_heads:
        yield (f"model.num_heads={model.num_heads} is not a multiple of model.num_kv_heads={model.num_kv_heads}: "
               f"every kv head serves the same number of heads; change one of them")
    if model.head_dim % 2:
        yield f"model.head_dim={model.head_dim} is odd: RoPE turns pairs; give an even head_dim"
    if model.rope_scaling.factor > 1 and model.rope_scaling.high_freq_factor <= model.rope_scaling.low_freq_factor:
        yield (f"model.rope_scaling.high_freq_factor={model.rope_scaling.high_freq_factor} is not above low_freq_factor="
               f"{model.rope_scaling.low_freq_factor}: the frequencies between them are blended; raise the high one")


@rule
def _feature_sizes(cfg: Config) -> Iterator[str]:
    """FP8 GEMMs need feature sizes of a multiple; rows are padded inside, features are not."""
    kind = numerics.scaling(cfg.precision.name)
    if kind is None:
        return
    model, tp = cfg.model, cfg.parallel.tensor_parallel
    sizes = {"model.hidden_size": model.hidden_size, "model.num_heads * model.head_dim": model.num_heads * model.head_dim,
             "model.num_kv_heads * model.head_dim": model.num_kv_heads * model.head_dim}
    if cfg.moe.num_experts:
        sizes["moe.ffn_hidden_size"] = cfg.moe.ffn_hidden_size
    else:
        sizes["model.ffn_hidden_size"] = model.ffn_hidden_size
    for name, size in sizes.items():
        share = "" if tp == 1 or name == "model.hidden_size" else f" / tensor_parallel={tp}"
        local = size // tp if share else size
        if local % kind.feature_multiple:
            yield (f"precision={cfg.precision.name} needs feature sizes that are multiples of {kind.feature_multiple}, and "
                   f"{name}{share} is {local}; change the size, or use another precision")


@rule
def _bf16_layers(cfg: Config) -> Iterator[str]:
    kept = cfg.precision.bf16_layers_at_start + cfg.precision.bf16_layers_at_end
    if kept > cfg.model.num_layers:
        yield (f"precision.bf16_layers_at_start + bf16_layers_at_end is {kept}, and the model has {cfg.model.num_layers} "
               f"layers; lower them")


@rule
def _forward_accumulation(cfg: Config) -> Iterator[str]:
    """Only cuBLASLt's dense products can be asked to add up fast. Whether the run's machine has them, the plan says."""
    asked = cfg.precision.forward_accumulation
    if asked == "fp32":
        return
    if reason := accumulation_reason(asked, cfg.precision.name):
        yield f"precision.{reason}"
    elif cfg.adapter.name == "maxtext":
        yield (f"precision.forward_accumulation={asked} with adapter=maxtext: XLA decides how its own products add up, and the "
               f"sm90 kernel adds in FP32; leave it out")
    elif cfg.moe.num_experts:
        yield (f"precision.forward_accumulation={asked} with moe.num_experts={cfg.moe.num_experts}: experts run as grouped "
               f"products, which add in FP32; leave it out")


# field -> (whether it means anything in this run, what it belongs to). A changed value that means nothing is refused.
_BELONGS: dict[str, tuple[Callable[[Config], bool], str]] = {
    **{f"precision.{name}": (lambda c: numerics.scaling(c.precision.name) is not None, "FP8 precisions")
       for name in ("weight_cache", "bf16_layers_at_start", "bf16_layers_at_end")},
    "precision.pow2_scale": (lambda c: c.precision.name in ("fp8_current", "fp8_rowwise", "fp8_block"),
                             "fp8_current, fp8_rowwise and fp8_block (mxfp8 scales are powers of two always)"),
    "precision.fuse": (lambda c: can_fuse(c), "FP8 precisions with adapter=megatron (a mixture of experts with sequence_parallel "
                                              "has nothing to fuse)"),
    "precision.amax_history_len": (lambda c: c.precision.name == "fp8_delayed", "precision=fp8_delayed"),
    "precision.amax_compute": (lambda c: c.precision.name == "fp8_delayed", "precision=fp8_delayed"),
    **{f"moe.{name}": (lambda c: c.moe.num_experts > 0, "models with moe.num_experts above 0")
       for name in ("top_k", "ffn_hidden_size", "grouped_gemm", "aux_loss_coeff")},
    "data.text_field": (lambda c: c.data.source in ("jsonl", "parquet"), "data=jsonl and data=parquet"),
    "data.path": (lambda c: c.data.source not in ("corpus", "synthetic"), "data that is the user's own"),
    "data.tokenizer_path": (lambda c: c.data.tokenizer in ("llama3", "hf"), "data.tokenizer=llama3 and hf"),
    "check.reason": (lambda c: c.check.mode == "record", "check.mode=record"),
    "run.tune": (lambda c: c.adapter.name == "megatron" and numerics.scaling(c.precision.name) is not None
                 and c.run.device != "cpu" and c.run.target != "cpu",
                 "FP8 runs on a GPU with adapter=megatron: only there can several kernels compute one product"),
    "track.entity": (lambda c: c.track.mode != "jsonl", "runs that wandb mirrors (track.mode is jsonl)"),
}


@rule
def _nothing_ignored(cfg: Config) -> Iterator[str]:
    values, defaults = flatten(cfg), _schema_defaults()
    for key, (applies, what) in _BELONGS.items():
        if values[key] != defaults[key] and not applies(cfg):
            yield f"{key}={values[key]} would be ignored: it belongs to {what}; leave it out"


def can_fuse(cfg: Config) -> bool:
    """Whether the run has an RMSNorm or a SwiGLU whose output is quantised right away."""
    nothing_left = cfg.moe.num_experts > 0 and cfg.parallel.sequence_parallel
    return numerics.scaling(cfg.precision.name) is not None and cfg.adapter.name == "megatron" and not nothing_left


def _schema_defaults() -> dict:
    return flatten(Config())


@rule
def _moe(cfg: Config) -> Iterator[str]:
    moe = cfg.moe
    if not moe.num_experts:
        return
    if moe.top_k > moe.num_experts:
        yield f"moe.top_k={moe.top_k} is above moe.num_experts={moe.num_experts}; lower top_k"
    if moe.ffn_hidden_size < 1:
        yield f"moe.num_experts={moe.num_experts} needs the width of an expert; set moe.ffn_hidden_size"


# ---- adapter, layout, parallel ----

@rule
def _adapter(cfg: Config) -> Iterator[str]:
    layouts = ADAPTER_LAYOUTS[cfg.adapter.name]
    if cfg.layout.name not in layouts:
        yield (f"layout={cfg.layout.name} with adapter={cfg.adapter.name}: the adapter feeds {', '.join(layouts)} to its "
               f"framework; set layout={layouts[0]} or another adapter")


@rule
def _parallel(cfg: Config) -> Iterator[str]:
    parallel = cfg.parallel
    if parallel.context_parallel > 1:
        yield (f"parallel.context_parallel={parallel.context_parallel} with layout={cfg.layout.name}: no attention kernel here "
               f"exchanges keys between ranks (neither ring nor all-gather); set parallel.context_parallel=1")
    if parallel.pipeline_parallel > 1:
        yield (f"parallel.pipeline_parallel={parallel.pipeline_parallel}: the training loop runs no pipeline schedule; "
               f"set parallel.pipeline_parallel=1")
    if parallel.expert_parallel > 1:
        yield (f"parallel.expert_parallel={parallel.expert_parallel}: the training loop dispatches no tokens between ranks; "
               f"set parallel.expert_parallel=1")
    if parallel.sequence_parallel and parallel.tensor_parallel == 1:
        yield "parallel.sequence_parallel=true splits rows over tensor-parallel ranks, and tensor_parallel is 1; set it to false"
    if parallel.name == "fsdp2" and parallel.grad_accum_fusion:
        yield ("parallel=fsdp2 with parallel.grad_accum_fusion=true: a fused weight gradient bypasses the reduce-scatter of "
               "FSDP2 and stays unreduced; set parallel.grad_accum_fusion=false")
    if (parallel.name == "fsdp2" and numerics.scaling(cfg.precision.name) and cfg.precision.keep_transpose
            and cfg.adapter.name == "megatron"):
        yield ("parallel=fsdp2 with precision.keep_transpose=true: the kept copy is a whole weight on every process, which is "
               "what sharding is there to avoid; set precision.keep_transpose=false")


@rule
def _tensor_parallel(cfg: Config) -> Iterator[str]:
    tp, model = cfg.parallel.tensor_parallel, cfg.model
    if tp == 1:
        return
    if cfg.parallel.name != "ddp" and not (cfg.adapter.name == "maxtext" and cfg.parallel.name == "fsdp2"):
        why = "is one process" if cfg.parallel.name == "single" else "shards whole weights over all processes"
        yield f"parallel.tensor_parallel={tp} with parallel={cfg.parallel.name}, which {why}; use parallel=ddp"
    sizes = {"model.num_heads": model.num_heads, "model.vocab_size": model.vocab_size}
    if cfg.moe.num_experts:
        sizes["moe.ffn_hidden_size"] = cfg.moe.ffn_hidden_size
    else:
        sizes["model.ffn_hidden_size"] = model.ffn_hidden_size
    for name, size in sizes.items():
        if size % tp:
            yield (f"{name}={size} does not divide by parallel.tensor_parallel={tp}: every rank holds an equal part; change one "
                   f"of them")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield (f"model.num_kv_heads={model.num_kv_heads} with parallel.tensor_parallel={tp}: kv heads are split over the ranks "
               f"or repeated on them, so one must be a multiple of the other; change one of them")


@rule
def _maxtext(cfg: Config) -> Iterator[str]:
    """What MaxText cannot do, or what would mean nothing there."""
    if cfg.adapter.name != "maxtext":
        return
    here = "with adapter=maxtext"
    precision, parallel, moe = cfg.precision, cfg.parallel, cfg.moe
    if cfg.attention.window_left is not None:
        yield f"attention.window_left={cfg.attention.window_left} {here}: sliding windows are not supported; leave it out"
    if precision.weight_cache != "per_step" or (not precision.keep_transpose and parallel.name != "fsdp2"):
        yield (f"precision.weight_cache={precision.weight_cache}, keep_transpose={precision.keep_transpose} {here}: XLA decides "
               f"what a step keeps; leave them out")
    if precision.bf16_layers_at_start or precision.bf16_layers_at_end:
        yield (f"precision.bf16_layers_at_start and bf16_layers_at_end {here}: one traced layer serves the whole stack; "
               f"leave them out")
    if parallel.sequence_parallel or parallel.grad_accum_fusion:
        yield f"parallel.sequence_parallel and grad_accum_fusion {here}: they belong to Megatron; set them to false"
    if moe.num_experts and not moe.grouped_gemm:
        yield f"moe.grouped_gemm=false {here}: experts run as one grouped GEMM; set it to true"
    if moe.num_experts and moe.aux_loss_coeff:
        yield f"moe.aux_loss_coeff={moe.aux_loss_coeff} {here}: MaxText's balancing loss counts padding; set it to 0"
    if moe.num_experts and precision.name in ("fp8_delayed", "mxfp8"):
        yield (f"precision={precision.name} with moe.num_experts={moe.num_experts} {here}: experts run in bf16, fp8_current, "
               f"fp8_rowwise or fp8_block; choose one of them")
    if cfg.run.threads is not None:
        yield (f"run.threads={cfg.run.threads} {here}: XLA takes the processors that the process may use; leave it out and start "
               f"the run under taskset")
    if cfg.run.init_from is not None:
        yield f"run.init_from {here}: only adapter=megatron starts from other weights; leave it out"
    if cfg.check.mode == "record":
        yield f"check.mode=record {here}: a golden curve is recorded with adapter=megatron, and checks both; use that"
    if cfg.testing.sabotage not in ("none", "no_document_mask"):
        yield f"testing.sabotage={cfg.testing.sabotage} {here}: only no_document_mask damages such a run"
    scaling = cfg.model.rope_scaling
    if scaling.factor != 1 and (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor,
                                scaling.original_max_position) != (8, 1, 4, 8192):
        yield (f"model.rope_scaling={scaling} {here}: MaxText knows llama 3.1's factors only (8, 1, 4, 8192); use those, or set "
               f"model.rope_scaling.factor=1")


def _world(cfg: Config, world_size: int) -> Iterator[str]:
    if world_size < 1:
        yield f"{world_size} processes: a run needs at least one"
        return
    if cfg.adapter.name == "maxtext":
        if world_size != 1:
            yield (f"adapter=maxtext with {world_size} processes: JAX drives every device of a machine from one process; leave "
                   f"--nproc out (parallel={cfg.parallel.name} takes all devices that JAX sees)")
        return
    tp, micro_rows = cfg.parallel.tensor_parallel, cfg.schedule.micro_rows
    if cfg.parallel.name == "single" and world_size != 1:
        yield (f"parallel=single with {world_size} processes: each would train its own copy; use parallel=ddp or "
               f"parallel=fsdp2, or one process")
    if world_size % tp:
        yield (f"{world_size} processes with parallel.tensor_parallel={tp}: {tp} processes make one copy of the model; start a "
               f"multiple of {tp}")
        return
    replicas = world_size // tp
    if cfg.schedule.global_rows % (micro_rows * replicas):
        yield (f"schedule.global_rows={cfg.schedule.global_rows} is not a multiple of micro_rows={micro_rows} * {replicas} "
               f"data-parallel processes = {micro_rows * replicas}: every process takes as many microbatches; change one of them")


# ---- data and schedule ----

@rule
def _schedule(cfg: Config) -> Iterator[str]:
    schedule, seq_len = cfg.schedule, cfg.data.seq_len
    step_tokens = schedule.global_rows * seq_len
    if schedule.global_rows % schedule.micro_rows:
        yield (f"schedule.global_rows={schedule.global_rows} is not a multiple of schedule.micro_rows={schedule.micro_rows}: "
               f"a step is a whole number of microbatches; change one of them")
    if schedule.tokens < step_tokens:
        yield (f"schedule.tokens={schedule.tokens} is less than one step, {schedule.global_rows} rows * {seq_len} tokens = "
               f"{step_tokens}; raise it or lower schedule.global_rows")
    trained = schedule.tokens // step_tokens * step_tokens  # a run is a whole number of steps
    if schedule.warmup_tokens >= max(trained, step_tokens):
        yield (f"schedule.warmup_tokens={schedule.warmup_tokens} is not below the {trained} tokens of the run's whole steps "
               f"(schedule.tokens={schedule.tokens}): the learning rate would never leave the warm-up; lower it")


@rule
def _vocabulary(cfg: Config) -> Iterator[str]:
    needed = VOCAB_NEEDED.get(cfg.data.tokenizer)
    if needed and cfg.model.vocab_size < needed:
        yield (f"data.tokenizer={cfg.data.tokenizer} has {needed} ids, and model.vocab_size={cfg.model.vocab_size} has fewer; "
               f"raise model.vocab_size to at least {needed}, or choose another tokenizer")
    if cfg.data.tokenizer == "hf" and cfg.data.tokenizer_path is None:
        yield "data.tokenizer=hf needs the folder of the tokenizer; set data.tokenizer_path=FOLDER"
    if cfg.data.source == "corpus" and cfg.check.mode == "golden" and cfg.data.val_fraction == 0:
        yield "check.mode=golden with data.val_fraction=0: the curve is judged on held-out text; raise data.val_fraction"


@rule
def _tilde(cfg: Config) -> Iterator[str]:
    """A shell expands ~ at the start of a word only, so it arrives as it was typed, and would make a folder of that name."""
    paths = {"data.path": cfg.data.path, "data.tokenizer_path": cfg.data.tokenizer_path, "run.dir": cfg.run.dir,
             "run.init_from": cfg.run.init_from}
    for key, path in paths.items():
        if path is not None and path.startswith("~"):
            yield f"{key}={path}: the shell leaves a ~ after '=' as it is; write \"$HOME\" or the whole path"


@rule
def _check_and_resume(cfg: Config) -> Iterator[str]:
    if cfg.check.mode == "record" and not cfg.check.reason:
        yield ("check.mode=record replaces the recipe's golden curve, and the file must say why; "
               "set check.reason='why the curve changes'")
    if cfg.check.mode == "record" and cfg.testing.sabotage != "none":
        yield f"check.mode=record with testing.sabotage={cfg.testing.sabotage}: a damaged run is no golden curve; drop one"
    if cfg.check.mode == "record" and cfg.schedule.stop_after_steps is not None:
        yield "check.mode=record with schedule.stop_after_steps: a golden curve is a whole run; drop one"
    if cfg.run.resume and cfg.run.dir is None:
        yield "run.resume=true continues a run directory; set run.dir=RUN_DIR"
    if cfg.run.device == "cpu" and cfg.run.target not in ("auto", "cpu"):
        yield f"run.device=cpu with run.target={cfg.run.target}: the kernels of a GPU do not run on the CPU; change one of them"
    if cfg.testing.sabotage == "no_document_mask" and cfg.layout.name != "thd":
        yield "testing.sabotage=no_document_mask damages packed rows only; set layout=thd"


# ---- what only a run on this machine needs ----

@run_rule
def _files(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if data.source not in ("corpus", "synthetic"):
        if data.path is None:
            yield f"data={data.name} reads the user's own text; set data.path=PATH"
        elif data.source == "megatron":
            missing = [name for name in (f"{data.path}.bin", f"{data.path}.idx") if not os.path.isfile(name)]
            if missing:
                yield f"data.path={data.path}: {' and '.join(missing)} not found; give the common prefix of a .bin and .idx pair"
        elif not os.path.exists(data.path):
            yield f"data.path={data.path}: no such file or folder (looked in {Path.cwd()}); correct the path"
    if data.tokenizer_path is not None and not os.path.exists(data.tokenizer_path):
        yield f"data.tokenizer_path={data.tokenizer_path}: no such file or folder; correct the path"
    if cfg.run.init_from is not None and not os.path.exists(cfg.run.init_from):
        yield f"run.init_from={cfg.run.init_from}: no such checkpoint; correct the path"


@run_rule
def _machine(cfg: Config) -> Iterator[str]:
    arch = "cpu" if cfg.run.device == "cpu" else machine_arch()
    if cfg.parallel.sequence_parallel and arch == "cpu":
        yield ("parallel.sequence_parallel=true on the CPU: Megatron gathers rows into CUDA buffers; set it to false, or run on "
               "a GPU")
    if cfg.run.device == "cuda" and arch == "cpu":
        yield "run.device=cuda: torch sees no GPU on this machine; set run.device=cpu, or run where the GPU is"
    elif cfg.run.tune and arch == "cpu":
        yield "run.tune=true measures kernels on a GPU, and torch sees none on this machine; leave run.tune out"
    elif cfg.run.target not in ("auto", arch):
        yield (f"run.target={cfg.run.target}: this run is on {arch}; leave run.target out to run here "
               f"(te-plugin explain plans for other machines)")


@run_rule
def _kernels(cfg: Config) -> Iterator[str]:
    """Every kernel of the run, asked of the plan that the launch will read."""
    from te_plugin.ops.recipe import plan_run

    if list(_machine(cfg)):
        return  # there is no such machine to plan for
    try:
        plan_run(cfg)
    except PlanError as error:
        yield str(error)
