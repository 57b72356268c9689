"""explain lists every kernel with its reason, for machines that are not here too."""

import re

import pytest

from te_plugin import AttentionProblem, PlanError, Target, cli, plan
from te_plugin.commands import memory, report
from te_plugin.config import compose
from te_plugin.config.sizes import parameter_count
from te_plugin.ops.recipe import problems_of
from te_plugin.plan import ARCHITECTURES, registered

TINY = "recipe=llama_tiny"


@pytest.fixture
def explain(capsys):
    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["explain", *argv])
        out = capsys.readouterr()
        return code, re.sub(r"\s+", " ", out.out), out.err

    return call


@pytest.mark.report("NVIDIA/TransformerEngine#3006")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_registered_kernel_is_named_on_every_target(explain, arch):
    code, out, err = explain(TINY, f"target={arch}")
    assert f"plan of llama_tiny for {arch}" in out
    for op in {problem.op for _, problem in problems_of(compose([TINY], for_run=False))}:
        for kernel in registered(op):
            assert kernel.name in out, (op, kernel.name)
    rows = report.plan_rows(compose([TINY, f"run.target={arch}"], for_run=False))
    assert code == (0 if all(row.plan for row in rows) else 1)
    if code:
        assert f"llama_tiny cannot run on {arch}" in err and "Traceback" not in err and err.count("\n") == 1


def test_explain_shows_the_plan_that_the_run_will_read():
    from te_plugin.ops.recipe import plan_run

    cfg = compose([TINY, "run.device=cpu"])
    assert {row.label: row.plan for row in report.plan_rows(cfg)} == plan_run(cfg)


@pytest.mark.parametrize("recipe", [TINY, "recipe=llama_moe_tiny"])
def test_fused_casts_stand_where_the_quantisations_they_replace_stood(recipe):
    dense = recipe == TINY
    fused = {"linear_qkv.norm_quantize_x"} | ({"linear_fc1.norm_quantize_x", "linear_fc2.swiglu_quantize_x",
                                               "linear_fc1.dswiglu_quantize_dy"} if dense else set())  # fmt: skip
    replaced = {"linear_qkv.quantize_x"} | ({"linear_fc1.quantize_x", "linear_fc2.quantize_x", "linear_fc1.quantize_dy",
                                             "swiglu"} if dense else set())  # fmt: skip
    labels = {fuse: {label for label, _ in problems_of(compose([recipe, f"precision.fuse={fuse}"], for_run=False))}
              for fuse in ("true", "false")}  # fmt: skip
    assert labels["true"] - labels["false"] == fused and labels["false"] - labels["true"] == replaced
    rows = {row.label: row for row in report.plan_rows(compose([recipe, "run.target=sm90"], for_run=False))}
    assert all(rows[label].plan.kernel.name == "sm90" for label in fused) and not replaced & set(rows)
    rows = {row.label: row for row in report.plan_rows(compose([recipe, "run.target=cpu"], for_run=False))}
    assert all(rows[label].plan.kernel.name == "separate" for label in fused)
    assert "linear_qkv.quantize_x" in rows and "linear_qkv.norm" in rows


def test_under_sequence_parallelism_tokens_are_gathered_between_norm_and_quantisation():
    cfg = compose([TINY, "parallel=ddp", "parallel.tensor_parallel=2", "parallel.sequence_parallel=true"], for_run=False)
    labels = {label for label, _ in problems_of(cfg)}
    assert {"linear_qkv.quantize_x", "linear_fc1.quantize_x", "linear_fc2.swiglu_quantize_x"} <= labels
    assert "linear_qkv.norm_quantize_x" not in labels


@pytest.mark.parametrize("overrides,count", [
    ([], 4), (["precision.bf16_layers_at_start=1"], 3), (["moe=tiny"], 4), (["precision=bf16"], None),
    (["precision.weight_cache=none"], None), (["parallel=fsdp2", "precision.keep_transpose=false"], None),
])  # fmt: skip
def test_the_weights_of_all_layers_are_planned_together_where_a_run_does_so(overrides, count):
    problems = dict(problems_of(compose([TINY, *overrides], for_run=False)))
    if count is None:
        assert "weights.quantize" not in problems
        return
    casts = problems["weights.quantize"].casts
    dense = {(problem.rows, problem.columns) for label, problem in problems.items() if label.endswith("quantize_w")}
    assert {n for _, n in casts} == ({count, 4 * count} if "moe=tiny" in overrides else {count})
    assert "moe=tiny" in overrides or {(cast.rows, cast.columns) for cast, _ in casts} == dense


def test_fast_accumulation_is_shown_for_the_forward_products_alone(explain):
    code, out, _ = explain(TINY, "target=sm90", "precision=fp8_current", "precision.forward_accumulation=fast")
    assert code == 0 and "fast accumulation" in out and "sm90: adds in FP32, and accumulation=fast was asked for" in out
    rows = report.plan_rows(compose([TINY, "run.target=sm90", "precision.forward_accumulation=fast"], for_run=False))
    products = {row.label: row.plan for row in rows if row.problem.op == "gemm"}
    assert {label for label, made in products.items() if made.note == "fast accumulation"} == {
        label for label in products if label.endswith(".forward")}  # fmt: skip
    code, _, err = explain(TINY, "target=cpu", "precision.forward_accumulation=fast")
    assert code == 1 and "4 of" in err and "(gemm)" in err and "fallback" not in err, "framework maths adds in FP32 too"


def test_a_kernel_asked_for_by_name_explains_the_others_too(explain):
    code, out, _ = explain(TINY, "run.device=cpu", "attention.kernel=composite")
    assert code == 0 and "cpu: kernel=composite was asked for" in out


def test_a_kernel_that_could_run_is_left_out_because_another_was_asked_for(explain):
    code, out, _ = explain(TINY, "target=cpu", "attention.kernel=cudnn")
    assert code == 1 and "cudnn: runs on sm90, not on cpu" in out and "cpu: kernel=cudnn was asked for" in out


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "composite", "cpu"])
def test_only_a_kernel_with_a_dq_accumulator_describes_one(kernel):
    found = {made.name: made for made in registered("attention")}[kernel]
    problem = AttentionProblem(8192, 8192, 4, 32, 8, 128, needs_backward=True)
    assert ("dQ accumulator" in found.describe_layout(problem)) == bool(found.buffers(problem))


def test_packed_attention_on_hopper_names_the_extra_it_comes_from(explain):
    code, out, _ = explain(TINY, "target=sm90")
    assert code == 0 and "te_plugin[cudnn]" in out


def test_an_impossible_kernel_exits_1_with_its_reason(explain):
    code, out, err = explain(TINY, "target=sm90", "attention.kernel=cpu")
    assert code == 1 and "runs on cpu, not on sm90" in out and "attention" in err


def test_the_matrix_takes_no_recipe(explain):
    code, _, err = explain("--matrix", TINY)
    assert code == 1 and "leave the other arguments out" in err


def test_sizes_are_those_of_the_recipe(explain):
    _, out, _ = explain("recipe=llama3_1_8b", "target=sm90", "--processes", "8")
    assert "4,194,304 = 512 rows of 8,192" in out and "8,030,261,248" in out and "64 a step and process" in out
    assert "token multiple 16 (fp8_current)" in out


def test_a_microbatch_that_will_be_padded_inside_is_told(explain):
    _, out, _ = explain(TINY, "target=cpu", "data.seq_len=1003", "schedule.micro_rows=1")
    assert "1,003 is padded inside to 1,008" in out


def test_a_recipe_for_a_gpu_asks_which_one(explain):
    code, _, err = explain("recipe=llama3_1_8b")
    assert code == 1 and "target=sm90" in err


@pytest.mark.parametrize("recipe,parameters", [("llama3_1_8b", 8_030_261_248), ("llama3_1_8b model=llama3_2_1b", 1_235_814_400)])
def test_parameters_are_those_that_the_models_are_published_with(recipe, parameters):
    cfg = compose([f"recipe={recipe.split()[0]}", *recipe.split()[1:]], for_run=False)
    assert parameter_count(cfg)[0] == parameters


def test_fsdp2_shares_weights_gradients_and_optimizer_state_and_not_activations():
    cfg = compose(["recipe=llama3_1_8b"], for_run=False)
    one, eight = memory.estimate(cfg, (), 1), memory.estimate(cfg, (), 8)
    assert [getattr(one, name) // 8 for name in ("weights", "gradients", "optimizer")] == [
        getattr(eight, name) for name in ("weights", "gradients", "optimizer")]
    assert one.activations == eight.activations and one.fp8_weights == eight.fp8_weights


def test_the_transposed_weight_copies_are_counted_when_they_are_kept():
    kept = memory.estimate(compose([TINY], for_run=False), ())
    rebuilt = memory.estimate(compose([TINY, "precision.keep_transpose=false"], for_run=False), ())
    assert kept.fp8_weights == 2 * rebuilt.fp8_weights > 0
    assert memory.estimate(compose([TINY, "precision=bf16"], for_run=False), ()).fp8_weights == 0


@pytest.mark.parametrize("kernel,scratch", [("cudnn", 8192 * 32 * (54 * 128 + 4)), ("flash", 0)])
def test_the_scratch_of_cudnn_is_shown_and_counted_once(explain, kernel, scratch):
    overrides = ["recipe=llama3_1_8b", "target=sm90", f"attention.kernel={kernel}"]
    _, out, _ = explain(*overrides)
    cfg = compose([f"run.{text}" if text.startswith("target") else text for text in overrides], for_run=False)
    assert cfg.schedule.micro_rows * cfg.data.seq_len == 8192
    plans = [row.plan for row in report.plan_rows(cfg)]
    with_scratch, without = memory.estimate(cfg, plans), memory.estimate(cfg, ())
    assert with_scratch.scratch == with_scratch.total - without.total == scratch
    assert f"scratch {report.size(scratch)}" in " ".join(out.split())


@pytest.mark.parametrize("labels,short", [
    (["norm"], "norm"), (["rope.q", "rope.k"], "rope.{q,k}"),
    (["linear_qkv.forward", "linear_qkv.dgrad", "linear_fc1.forward", "linear_fc1.dgrad"], "linear_{qkv,fc1}.{forward,dgrad}"),
    (["linear_qkv.forward", "linear_fc1.dgrad"], "linear_qkv.forward, linear_fc1.dgrad"),
    (["experts_fc1", "experts_fc2"], "experts_{fc1,fc2}")])
def test_labels_are_shortened_without_losing_one(labels, short):
    assert report.shorten(labels) == short


@pytest.mark.report("NVIDIA/TransformerEngine#3006")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("window", [(-1, -1), (1023, 0)])
@pytest.mark.parametrize("needs_backward", [True, False])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_attention_problem_has_a_kernel_or_one_reason_a_kernel(head_dim, window, needs_backward, arch):
    problem = AttentionProblem(2048, 2048, 16, 16, 8, head_dim, window=window, needs_backward=needs_backward)
    names = {kernel.name for kernel in registered("attention")}
    try:
        chosen = plan(problem, Target(arch, "torch"))
    except PlanError as error:
        assert all(f"\n  {name}: " in str(error) for name in names)
    else:
        assert {chosen.kernel.name, *(name for name, _ in chosen.rejected)} == names
        assert not chosen.is_fallback and all(reason for _, reason in chosen.rejected)
