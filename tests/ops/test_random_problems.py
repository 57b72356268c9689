"""Random packings, dtypes and scalings, made and shrunk by hypothesis.

The normal run takes a few fixed examples; `pytest --hypothesis-profile=thorough tests/ops/test_random_problems.py` takes 2,000
random ones a property.
"""

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from te_plugin import oracle
from te_plugin.numerics import FORMATS, GRANULARITIES, SCALINGS
from te_plugin.ops.quantize.problem import QuantizeProblem

from . import test_quantize
from .checking import bound_of, check_attention, check_same_bits
from .problems import AttentionCase
from .reference import answer_for, rounded, rounded_inputs
from .runners import attention_problem, implementations, to_torch

# Not JAX: XLA compiles anew for every shape.
ATTENTION = [i for i in implementations("attention") if i.runner.name != "jax"]
LENGTH = st.one_of(st.integers(0, 5), st.integers(0, 40), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65]))


@st.composite
def attention_cases(draw) -> AttentionCase:
    q = tuple(draw(st.lists(LENGTH, min_size=1, max_size=6)))
    mask = draw(st.sampled_from(["none", "causal", "causal_top_left", "causal_bottom_right"]))
    k = None
    if mask != "causal" and draw(st.booleans()):
        k = tuple(draw(st.lists(LENGTH, min_size=len(q), max_size=len(q))))
    slots = lambda lengths: tuple(n + draw(st.sampled_from([0, 0, 1, 7, 16])) for n in lengths)  # noqa: E731
    gaps = draw(st.booleans())
    side = st.one_of(st.none(), st.integers(0, 9))
    kv_heads = draw(st.integers(1, 3))
    return AttentionCase(
        f"random-{draw(st.integers(0, 2**32 - 1))}", q, k,
        q_slots=slots(q) if gaps else None, k_slots=slots(k) if gaps and k is not None else None,
        q_tail=draw(st.integers(0, 3)), k_tail=0 if k is None else draw(st.integers(0, 3)),
        heads=kv_heads * draw(st.integers(1, 3)), kv_heads=kv_heads, head_dim=draw(st.sampled_from([8, 17, 32, 64, 120, 128])),
        mask=mask, window=draw(st.one_of(st.none(), st.tuples(side, side))),
        scale=draw(st.sampled_from([None, 1.0, 0.05])),
    )  # fmt: skip


@given(attention_cases(), st.sampled_from(["fp32", "bf16", "fp16"]), st.sampled_from(["fp32", "bf16"]))
def test_attention_on_random_packings(case, dtype, dq):
    inputs = rounded_inputs(case, dtype)
    answer = answer_for(case, inputs)
    poisoned = {name: x.copy() for name, x in inputs.items()}
    for name, x in poisoned.items():
        x[case.outside("q" if name in ("q", "dout") else "k")] = np.nan
    for i in ATTENTION:
        if i.supports(attention_problem(case, dtype, dq_accumulation=dq)):
            result = i.runner.attention(case, poisoned, dtype, i.kernel.name, dq_accumulation=dq)
            check_attention(case, result, answer, bound_of(dtype, dq))
            if i.kernel.library and i.runner.name == "raw":
                again = i.runner.attention(case, inputs, dtype, i.kernel.name, dq_accumulation=dq)
                check_same_bits(result, again, f"{case.name} with and without NaN outside its segments")


@given(
    shape=st.tuples(st.integers(0, 300), st.integers(1, 300)),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    fmt=st.sampled_from(list(FORMATS)),
    granularity=st.sampled_from(GRANULARITIES),
    pow2=st.booleans(),
    transpose=st.booleans(),
    values=st.sampled_from(test_quantize.VALUES),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantise_on_random_shapes(shape, dtype, fmt, granularity, pow2, transpose, values, seed):
    x = test_quantize.make(values, shape, np.random.default_rng(seed))
    problem = QuantizeProblem(*shape, dtype, fmt, granularity, pow2, transpose)
    for i in test_quantize.IMPLEMENTATIONS:
        if i.supports(problem):
            test_quantize.check(test_quantize.RUN[i.runner.name](i, problem, x, None), x, problem)


PRECISIONS = ["fp32", *(name for name, kind in SCALINGS.items() if not kind.delayed)]


@given(
    sizes=st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=5),
    surplus=st.integers(0, 3),
    precision=st.sampled_from(PRECISIONS),
    tiles=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pow2=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_linear_and_grouped_linear_on_random_groups(sizes, surplus, precision, tiles, pow2, seed):
    from te_plugin.torch import grouped_linear, linear

    rng = np.random.default_rng(seed)
    pow2 = pow2 and precision in SCALINGS  # refused where there are no scales
    multiple = SCALINGS[precision].feature_multiple if precision in SCALINGS else 5
    n, k = (multiple * t for t in tiles)
    rows = sum(sizes) + surplus
    x, weight, dy = (rounded(rng.standard_normal(s), "fp32") for s in ((rows, k), (len(sizes), n, k), (rows, n)))
    x[rows - surplus :], dy[rows - surplus :] = np.nan, np.nan
    tx, tw = to_torch(x, "fp32").requires_grad_(), to_torch(weight, "fp32").requires_grad_()
    y = grouped_linear(tx, tw, to_torch(np.array(sizes), "int32"), precision, pow2_scale=pow2)
    y.backward(to_torch(dy, "fp32"))
    dx, dw = oracle.grouped_linear_backward(dy, x, weight, sizes, precision, pow2=pow2)
    want = (oracle.grouped_linear(x, weight, sizes, precision, pow2=pow2), dx, dw)
    for name, got, expected in zip(("y", "dx", "dw"), (y.detach(), tx.grad, tw.grad), want, strict=True):
        assert oracle.compare(got.numpy(), expected).relative < 5e-6, name
    real = slice(0, rows - surplus)
    y = linear(tx[real], tw[0], None, precision, pow2_scale=pow2).detach().numpy()
    assert oracle.compare(y, oracle.linear(x[real], weight[0], None, precision, pow2=pow2)).relative < 5e-6


@given(
    amax=st.lists(st.lists(st.floats(0, 2.0**127, width=32), min_size=0, max_size=3), min_size=1, max_size=30),
    window=st.integers(1, 6),
    compute=st.sampled_from(["max", "most_recent"]),
)
def test_delayed_scaling_on_random_histories(amax, window, compute):
    from te_plugin.torch import DelayedScaling

    from .test_delayed_scaling import KIND, tensor_of

    state = DelayedScaling(KIND, history_len=window, amax_compute=compute)
    expected = oracle.DelayedScaling(KIND.forward_format, window, compute)
    for step in amax:
        for a in step:
            state.quantize(tensor_of(a), "activation")
        state.advance()
        if step:
            expected.step(*step)
        assert state.scale[0].item() == expected.scale


def test_the_seed_of_a_case_is_its_name():
    """Examples are replayed from their printed case: the inputs depend on the name alone."""
    one, two = AttentionCase("random-1", (3,)), AttentionCase("random-1", (3,))
    assert np.array_equal(one.inputs()["q"], two.inputs()["q"])
    assert zlib.crc32(b"random-1") != zlib.crc32(b"random-2")
