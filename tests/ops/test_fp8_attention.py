"""The exported FP8 attention of a compiled library, step by step against the FP8 oracle, and within the bounds of the format.

The kernel quantises and sums in FP32, the oracle in float64: they part where a value lies next to a rounding boundary of FP8, so
outputs agree to a small part of the format's own error, not to the bit.
"""

import functools

import numpy as np
import pytest
import torch

from te_plugin import ffi, oracle
from te_plugin.numerics import E4M3, E5M2
from te_plugin.ops.attention.kernels import dq_buffers
from te_plugin.ops.attention.problem import DQ_CODE, MASK_CODE

from .checking import BOUNDS, check_attention, check_same_bits
from .problems import CASES, AttentionCase
from .reference import attention_answer, rounded_inputs
from .runners import attention_problem, nan_tensor, numpy, to_torch

LIBRARY = "cpu"
SCHEMES = {
    "tensor": oracle.Fp8AttentionScheme(),
    "head": oracle.Fp8AttentionScheme(operands="head"),
    "row": oracle.Fp8AttentionScheme(operands="row"),
    "e5m2-gradients": oracle.Fp8AttentionScheme(gradient_format=E5M2),
    "centred": oracle.Fp8AttentionScheme(centre_k=True),
    "centred-rotated": oracle.Fp8AttentionScheme(centre_k=True, rotate=True),
}
NAMES = {
    "table-100-80-76", "table-64x4", "one-token", "no-rows", "tile-127-128-129", "zero-middle", "many-short", "tail-only",
    "gaps-documented", "capacity-with-tail", "bottom-right-longer-queries", "segments-without-queries",
    "segments-without-keys", "cross-gaps-and-tails", "window-tile", "window-bottom-right", "gqa-6-to-3", "head-dim-120",
    "head-dim-256", "all-empty-with-rows",
}  # fmt: skip
TABLE = [case for case in CASES if case.name in NAMES]
# FP8 kernels on normal data: E5M2 gradients are outside the bound of E4M3.
E5M2_BOUND = BOUNDS["fp8"].__class__(out=5.5e-2, grad=1.3e-1, cosine=0.99, noise=1e-1, lse=0.5)

if not ffi.exports(LIBRARY, "attention_fp8_forward"):
    pytest.skip("the library has no FP8 attention", allow_module_level=True)
call = functools.partial(ffi.function, LIBRARY)


def quantize(x: np.ndarray, dtype, cu, start, scheme, fmt, centre=False, rotate=False):
    """(data, scale_inv, stats) of an operand; every output starts as 0xFF or NaN."""
    shape = {"tensor": (1,), "head": (x.shape[1],), "row": x.shape[:2]}[scheme.operands]
    data, scale_inv, stats = nan_tensor(x.shape, fmt.name), nan_tensor(shape, "fp32"), nan_tensor((2,), "fp32")
    segments = [to_torch(s, "int32") for s in (cu, start)]
    call("attention_quantize")(to_torch(x, dtype), *segments, data, scale_inv, stats, fmt.code, int(centre), int(rotate))
    return data, scale_inv, stats


def run(case: AttentionCase, inputs, dtype: str, scheme: oracle.Fp8AttentionScheme, dq: str = "fp32") -> dict[str, np.ndarray]:
    problem = attention_problem(case, dtype, dq_accumulation=dq)
    fwd, grad = scheme.forward_format, scheme.gradient_format
    q8 = quantize(inputs["q"], dtype, case.cu_q, case.start_q, scheme, fwd, rotate=scheme.rotate)
    k8 = quantize(inputs["k"], dtype, case.cu_k, case.start_k, scheme, fwd, scheme.centre_k, scheme.rotate)
    v8 = quantize(inputs["v"], dtype, case.cu_k, case.start_k, scheme, fwd)
    do8 = quantize(inputs["dout"], dtype, case.cu_q, case.start_q, scheme, grad)
    segments = [to_torch(s, "int32") for s in (case.cu_q, case.cu_k, case.start_q, case.start_k)]
    out, lse = nan_tensor(inputs["q"].shape, dtype), nan_tensor((case.heads, case.q_rows), "fp32")
    place = (MASK_CODE[case.mask], *problem.window, problem.scale)
    operands = [q8[0], k8[0], v8[0], q8[1], k8[1], v8[1]]
    call("attention_fp8_forward")(*operands, *segments, out, lse, *place, fwd.code, scheme.p_scale)
    dq_out, dk, dv = (nan_tensor(inputs[n].shape, dtype) for n in ("q", "k", "v"))
    (spec,) = dq_buffers(problem)
    scratch = torch.zeros(spec.shape, dtype=torch.float32 if spec.dtype == "fp32" else torch.bfloat16)
    call("attention_fp8_backward")(
        do8[0], *operands[:3], do8[1], *operands[3:], out, lse, *segments, dq_out, dk, dv, scratch, *place, DQ_CODE[dq],
        fwd.code, grad.code, scheme.p_scale, int(scheme.rotate),
    )  # fmt: skip
    return {"out": numpy(out), "lse": numpy(lse), "dq": numpy(dq_out), "dk": numpy(dk), "dv": numpy(dv)}


def expected(case: AttentionCase, inputs, scheme) -> dict[str, np.ndarray]:
    segments = (case.cu_q, case.cu_k, case.start_q, case.start_k)
    options = dict(mask=case.mask, window=case.window, scale=case.scale, scheme=scheme)
    q, k, v, dout = (inputs[n] for n in ("q", "k", "v", "dout"))
    out, lse = oracle.fp8_attention_forward(q, k, v, *segments, **options)
    dq, dk, dv = oracle.fp8_attention_backward(dout, q, k, v, *segments, **options)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def grid(cases=TABLE):
    for case in cases:
        for name, scheme in SCHEMES.items():
            power_of_two = case.head_dim & (case.head_dim - 1) == 0
            if power_of_two or not scheme.rotate:
                yield pytest.param(case, scheme, id=f"{case.name}-{name}")


@pytest.mark.parametrize("case,scheme", list(grid()))
def test_every_segment_stays_within_the_bounds_of_the_format_and_near_the_fp8_oracle(case, scheme):
    inputs = rounded_inputs(case, "fp32")
    result = run(case, inputs, "fp32", scheme)
    exact = attention_answer(case, "fp32")
    # Centring shifts a row's scores by one constant, and with it the log-sum-exp.
    compared = {n: x for n, x in result.items() if n != "lse" or not scheme.centre_k}
    check_attention(case, compared, exact, E5M2_BOUND if scheme.gradient_format is E5M2 else BOUNDS["fp8"])
    want = expected(case, inputs, scheme)
    finite = np.isfinite(want["lse"])
    assert np.array_equal(np.isneginf(result["lse"]), ~finite)
    # One value beside a rounding boundary of FP8 moves a score by a step of its code.
    np.testing.assert_allclose(result["lse"][finite], want["lse"][finite], rtol=1e-5, atol=1e-3)
    for name in ("out", "dq", "dk", "dv"):
        found = oracle.compare(result[name], want[name])
        scale = np.linalg.norm(exact.size[name])
        assert found.relative < 1e-2 or np.linalg.norm(result[name] - want[name]) < 2e-3 * scale, f"{name}: {found}"


@pytest.mark.parametrize("dtype,dq", [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")])
@pytest.mark.parametrize("case", [c for c in TABLE if c.head_dim <= 128], ids=lambda c: c.name)
def test_half_precision_and_both_dq_layouts(case, dtype, dq):
    result = run(case, rounded_inputs(case, dtype), dtype, SCHEMES["tensor"], dq)
    check_attention(case, result, attention_answer(case, dtype), BOUNDS["fp8"])


@pytest.mark.report("NVIDIA/TransformerEngine#2892")
@pytest.mark.parametrize("case,scheme", list(grid([c for c in TABLE if c.outside("q").any() or c.outside("k").any()])))
def test_poison_outside_segments_changes_no_bit_and_no_scale(case, scheme):
    clean, poisoned = case.inputs(), case.inputs()
    for name in clean:
        outside = case.outside("q" if name in ("q", "dout") else "k")
        clean[name][outside], poisoned[name][outside] = 0, np.nan
    check_same_bits(run(case, poisoned, "bf16", scheme), run(case, clean, "bf16", scheme), case.name)


def test_uniform_probe_of_the_documented_gaps():
    case = next(c for c in TABLE if c.name == "gaps-documented")
    inputs = {name: np.zeros_like(x) for name, x in case.inputs().items()}
    real = np.flatnonzero(~case.outside("q"))
    # E4M3 holds 0..15 exactly, so with a scale that is a power of two the means are those of the report.
    inputs["v"][real] = np.arange(14)[:, None, None]
    out = run(case, inputs, "fp32", SCHEMES["tensor"])["out"]
    want = [0, 1, 2, 3, 3.5, 4, 4.5, 7, 7.5, 8, 10, 10.5, 12, 13]
    np.testing.assert_allclose(out[real, 0, 0], want, rtol=2**-4)
    assert out.shape[0] == 16 and (out[case.outside("q")] == 0).all()


def test_a_segment_with_row_scales_equals_itself_alone():
    case = next(c for c in TABLE if c.name == "table-100-80-76")
    inputs, scheme = case.inputs(), SCHEMES["row"]
    packed = run(case, inputs, "bf16", scheme)
    for n in range(case.segments):
        own = {name: x[case.q_range(n)] for name, x in inputs.items()}
        alone = run(case.alone(n), own, "bf16", scheme)
        for name in ("out", "dq", "dk", "dv"):
            assert np.array_equal(packed[name][case.q_range(n)], alone[name]), f"segment {n} {name}"


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("operands", ["tensor", "head", "row"])
def test_quantised_operands_are_bit_equal_to_the_scaling_oracle(operands, fmt, rng):
    case = next(c for c in TABLE if c.name == "gqa-6-to-3")
    x = case.inputs()["q"] * 10 ** rng.uniform(-3, 3, (case.q_rows, 1, 1)).astype(np.float32)
    scheme = oracle.Fp8AttentionScheme(operands=operands)
    data, scale_inv, stats = quantize(x, "fp32", case.cu_q, case.start_q, scheme, fmt)
    if operands == "tensor":
        want = oracle.quantize(x.reshape(1, -1), fmt)
        codes = want.data.reshape(x.shape)
    elif operands == "head":
        want = oracle.quantize(x.transpose(1, 0, 2).reshape(case.heads, -1), fmt, "row")
        codes = want.data.reshape(case.heads, case.q_rows, -1).transpose(1, 0, 2)
    else:
        want = oracle.quantize(x.reshape(-1, case.head_dim), fmt, "row")
        codes = want.data.reshape(x.shape)
    assert np.array_equal(scale_inv.numpy().ravel(), want.scale_inv.ravel())
    assert np.array_equal(data.view(torch.uint8).numpy(), codes)
    assert stats.tolist() == [np.abs(x).max(), 0]
