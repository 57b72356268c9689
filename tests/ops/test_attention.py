"""Every registered attention kernel on every problem of the table, against the float64 oracle, segment by segment."""

import dataclasses

import numpy as np
import pytest

from te_plugin.plan import PlanError, registered

from .checking import BOUNDS, check_attention, check_same_bits
from .problems import CASES, COMPILED_PER_SHAPE, SEGMENT_TABLES, AttentionCase
from .reference import attention_answer, rounded_inputs
from .runners import RUNNERS, attention_problem, implementations, parameter

IMPLEMENTATIONS = implementations("attention")
MODES = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]


def table(cases=CASES, modes=MODES):
    """(implementation, case, dtype, dq_accumulation) for all that the kernel's plan accepts."""
    return [
        parameter(implementation, case, dtype, dq, name=f"{case.name}-{dtype}-dq_{dq}")
        for case in cases
        for dtype, dq in modes
        for implementation in IMPLEMENTATIONS
        if (implementation.runner.name != "jax" or case in COMPILED_PER_SHAPE)
        and implementation.supports(attention_problem(case, dtype, dq_accumulation=dq))
    ]


every_kernel = pytest.mark.parametrize("implementation,case,dtype,dq", table())


@every_kernel
def test_outputs_and_gradients_of_every_segment_equal_the_oracle(implementation, case, dtype, dq):
    result = implementation.runner.attention(
        case, rounded_inputs(case, dtype), dtype, implementation.kernel.name, dq_accumulation=dq
    )
    check_attention(case, result, attention_answer(case, dtype), BOUNDS[dtype])


@pytest.mark.parametrize("implementation,case,dtype,dq", table(modes=[("bf16", "fp32")]))
def test_uniform_probe_gives_the_mean_of_the_visible_values(implementation, case, dtype, dq):
    """Q = K = 0 and V in {0, 1}: the output is the share of visible keys whose value is 1, known without any softmax."""
    inputs = {name: np.zeros_like(x) for name, x in case.inputs().items()}
    inputs["v"] = (case.inputs()["v"] > 0).astype(np.float32)
    got = implementation.runner.attention(case, inputs, dtype, implementation.kernel.name, backward=False)["out"]
    want = uniform_means(case, inputs["v"])
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=2**-10)


def uniform_means(case: AttentionCase, v: np.ndarray) -> np.ndarray:
    want = np.zeros((case.q_rows, case.heads, case.head_dim))
    left, right = case.window or (None, None)
    for n in range(case.segments):
        rows, keys = case.q_range(n), case.k_range(n)
        k_len, q_len = keys.stop - keys.start, rows.stop - rows.start
        for i in range(q_len):
            place = i + (k_len - q_len if case.mask == "causal_bottom_right" else 0)
            first = 0 if left is None else max(0, place - left)
            last = k_len - 1 if right is None else min(k_len - 1, place + right)
            if case.mask != "none":
                last = min(last, place)
            if first <= last:
                mean = v[keys][first : last + 1].astype(np.float64).mean(axis=0)
                want[rows.start + i] = np.repeat(mean, case.heads // case.kv_heads, axis=0)
    return want


@every_kernel
def test_leak_probe_is_exactly_zero(implementation, case, dtype, dq):
    """Channel c of V is 0 in the segments that own channel c and 1 in every other row; then dO is 0 outside one segment."""
    inputs = case.inputs()
    inputs["v"] = np.ones_like(inputs["v"])
    for n in range(case.segments):
        inputs["v"][case.k_range(n), :, n % case.head_dim] = 0
    victim = int(np.argmax(case.q_lengths))
    for n in range(case.segments):
        if n != victim:
            inputs["dout"][case.q_range(n)] = 0
    result = implementation.runner.attention(case, inputs, dtype, implementation.kernel.name, dq_accumulation=dq)
    for n in range(case.segments):
        rows, keys = case.q_range(n), case.k_range(n)
        assert (result["out"][rows, :, n % case.head_dim] == 0).all(), f"segment {n} sees another segment's values"
        if n != victim:
            assert (result["dq"][rows] == 0).all(), f"dq of segment {n} holds gradient of segment {victim}"
            for name in ("dk", "dv"):
                assert (result[name][keys] == 0).all(), f"{name} of segment {n} holds gradient of segment {victim}"


@pytest.mark.parametrize(
    "implementation,case,dtype,dq",
    table([case for case in CASES if case.outside("q").any() or case.outside("k").any()]),
)
def test_poison_in_rows_outside_segments_changes_no_bit(implementation, case, dtype, dq):
    clean, poisoned = case.inputs(), case.inputs()
    for name in clean:
        outside = case.outside("q" if name in ("q", "dout") else "k")
        clean[name][outside], poisoned[name][outside] = 0, np.nan
    run = implementation.runner.attention
    kernel = implementation.kernel.name
    check_same_bits(run(case, poisoned, dtype, kernel, dq_accumulation=dq), run(case, clean, dtype, kernel, dq_accumulation=dq),
                    f"{case.name} with NaN outside its segments")  # fmt: skip


@pytest.mark.parametrize(
    "implementation,case,dtype,dq",
    [p for p in table([case for case in CASES if 1 < case.segments <= 8], [("bf16", "fp32")]) if "-jax-" not in p.id],
)
def test_a_packed_segment_equals_itself_alone(implementation, case, dtype, dq):
    inputs, kernel, run = case.inputs(), implementation.kernel.name, implementation.runner.attention
    packed = run(case, inputs, dtype, kernel)
    for n in range(case.segments):
        rows, keys = case.q_range(n), case.k_range(n)
        own = {"q": inputs["q"][rows], "k": inputs["k"][keys], "v": inputs["v"][keys], "dout": inputs["dout"][rows]}
        alone = run(case.alone(n), own, dtype, kernel)
        for name in ("out", "dq", "dk", "dv"):
            got, want = packed[name][rows if name in ("out", "dq") else keys], alone[name]
            if implementation.kernel.library:
                assert np.array_equal(got, want), f"segment {n} {name} differs from the segment run alone"
            else:
                # Framework maths multiplies the whole batch at once: FP32 sums come in another order.
                np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-9, err_msg=f"segment {n} {name}")


@pytest.mark.parametrize("implementation,case,dtype,dq", table(SEGMENT_TABLES + CASES[20:24]))
def test_deterministic_kernels_give_the_same_bits_twice(implementation, case, dtype, dq):
    if not implementation.supports(attention_problem(case, dtype, dq_accumulation=dq, deterministic=True)):
        pytest.skip("the kernel refuses deterministic=True, so it promises nothing")
    run = lambda: implementation.runner.attention(  # noqa: E731
        case, case.inputs(), dtype, implementation.kernel.name, dq_accumulation=dq, deterministic=True
    )
    check_same_bits(run(), run(), f"{case.name} run twice")


def test_every_problem_is_run_by_a_compiled_kernel_and_by_framework_maths():
    missing = []
    for case in CASES:
        for dtype in ("fp32", "bf16", "fp16"):
            ran = {i.kernel.name for i in IMPLEMENTATIONS if i.supports(attention_problem(case, dtype))}
            if not {"cpu", "composite"} <= ran:
                missing.append((case.name, dtype, ran))
    assert not missing
    assert len(CASES) >= 35 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("implementation,case,dtype,dq", table(SEGMENT_TABLES, [("fp16", "fp32")]))
def test_half_precision_equals_the_oracle(implementation, case, dtype, dq):
    result = implementation.runner.attention(case, rounded_inputs(case, dtype), dtype, implementation.kernel.name)
    check_attention(case, result, attention_answer(case, dtype), BOUNDS[dtype])


FP8 = [
    (implementation, case)
    for case in CASES
    for implementation in IMPLEMENTATIONS
    if implementation.runner.name != "raw"  # its operands are quantised first: test_fp8_attention.py
    and implementation.supports(attention_problem(case, "bf16", precision="fp8"))
]


@pytest.mark.parametrize("implementation,case", [parameter(i, c, name=c.name) for i, c in FP8])
def test_fp8_attention_stays_within_its_bound(implementation, case):
    result = implementation.runner.attention(
        case, rounded_inputs(case, "bf16"), "bf16", implementation.kernel.name, precision="fp8"
    )
    # A score's rounding error grows with the softmax scale, and the log-sum-exp takes it over.
    steep = max(1.0, (case.scale or 0.0) * case.head_dim**0.5)
    bound = dataclasses.replace(BOUNDS["fp8"], lse=BOUNDS["fp8"].lse * steep)
    check_attention(case, result, attention_answer(case, "bf16"), bound)


@pytest.mark.parametrize("kernel", registered("attention"), ids=lambda k: k.name)
def test_dq_in_bf16_is_obeyed_or_refused_never_ignored(kernel):
    case = SEGMENT_TABLES[1]
    for runner in RUNNERS:
        if not runner.can_call(kernel):
            continue
        try:
            plan = runner.plan(attention_problem(case, "bf16", dq_accumulation="bf16"), kernel.name)
        except PlanError as refusal:
            assert "bf16" in str(refusal) or "runs on" in str(refusal)
            continue
        buffers = {spec.name: spec for spec in plan.buffers}
        assert buffers["dq_acc"].dtype == "bf16"
        assert buffers["dq_acc"].shape == (1, case.segments, case.heads, 256, 128)


RAW = [i for i in IMPLEMENTATIONS if i.runner.name == "raw"]


@pytest.mark.parametrize("implementation", RAW, ids=str)
@pytest.mark.parametrize("case", SEGMENT_TABLES, ids=lambda c: c.name)
@pytest.mark.parametrize("dq", ["fp32", "bf16"])
def test_a_kernel_given_the_other_layouts_buffer_is_caught(implementation, case, dq):
    """Forces the fault that corrupted dQ in the field: one place chose the layout, another allocated it."""
    other = {"fp32": "bf16", "bf16": "fp32"}[dq]
    if not all(implementation.supports(attention_problem(case, "bf16", dq_accumulation=d)) for d in (dq, other)):
        pytest.skip("the kernel has one dQ layout")
    wrong = implementation.runner.plan(
        attention_problem(case, "bf16", dq_accumulation=other), implementation.kernel.name
    ).buffers_of("backward")
    with pytest.raises((ValueError, AssertionError), match="dq"):
        result = implementation.runner.attention(
            case, rounded_inputs(case, "bf16"), "bf16", implementation.kernel.name, dq_accumulation=dq, buffers=wrong
        )
        check_attention(case, result, attention_answer(case, "bf16"), BOUNDS["bf16"])


@pytest.mark.parametrize("case", [c for c in SEGMENT_TABLES if c.segments > 1], ids=lambda c: c.name)
def test_the_suite_catches_every_segment_written_to_slot_zero(case):
    """The same fault in a kernel that does not check its buffer: all segments write slot 0, so the last one wins there."""
    answer = attention_answer(case, "bf16")
    slot = np.zeros((max(case.q_lengths), case.heads, case.head_dim))
    for n in range(case.segments):
        slot[: case.q_lengths[n]] = answer.dq[case.q_range(n)]
    dq = np.zeros_like(answer.dq)
    dq[case.q_range(0)] = slot[: case.q_lengths[0]]
    result = {name: getattr(answer, name) for name in ("out", "lse", "dk", "dv")}
    check_attention(case, result | {"dq": answer.dq}, answer, BOUNDS["bf16"])
    with pytest.raises(AssertionError, match=r"segment 1 dq: relative error .* first differing index \(1, 0, 0\)"):
        check_attention(case, result | {"dq": dq}, answer, BOUNDS["bf16"])


def test_a_failure_names_segment_output_and_index():
    case = dataclasses.replace(SEGMENT_TABLES[1])
    answer = attention_answer(case, "fp32")
    dk = answer.dk.copy()
    dk[130, 1, 3] += 50
    with pytest.raises(AssertionError, match=r"segment 1 dk: .*first differing index \(30, 1, 3\)"):
        check_attention(case, {"dk": dk}, answer, BOUNDS["fp32"])
    out = answer.out.copy()
    out[5] = np.nan
    with pytest.raises(AssertionError, match="segment 0 out: relative error inf"):
        check_attention(case, {"out": out}, answer, BOUNDS["fp32"])
