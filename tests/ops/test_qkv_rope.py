"""QKV split + rotary embedding, plain and with FP8 output: against float64, and the bytes of the separate ops."""

from dataclasses import fields as fields_of
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import te_plugin.torch as tp
from te_plugin import numerics, oracle
from te_plugin.ops.qkv_rope.problem import LAYOUT_CODE, QkvRopeProblem
from te_plugin.ops.qkv_rope_quantize.problem import QkvRopeQuantizeProblem
from te_plugin.plan import PlanError, Target, plan
from te_plugin.torch.quantize import QuantizeOptions, quantize_2d

from .reference import rounded
from .runners import implementations, nan_filled_memory, numpy, parameter, to_torch

LAYOUTS = tuple(LAYOUT_CODE)
DTYPES = ("fp32", "bf16", "fp16")
BOUND = {"fp32": 2e-6, "bf16": 4e-3, "fp16": 5e-4}
# tokens, heads, kv_heads, head_dim
SHAPES = [(33, 8, 2, 128), (17, 4, 4, 64), (5, 6, 1, 256), (130, 2, 1, 96), (9, 3, 3, 20), (1, 1, 1, 2), (0, 4, 2, 64)]
TORCH_SM90 = Target("sm90", "torch")
PLAIN = QkvRopeProblem(8192, 32, 8, 128)
QUANTIZE = QkvRopeQuantizeProblem(PLAIN)


def table(tokens, head_dim, rng):
    return rng.integers(0, 100_000, tokens), oracle.rope_inv_freq(head_dim, 500000.0, factor=8.0)


def cases(op, problem_type):
    return [
        parameter(i, shape, layout, dtype, name=f"{'x'.join(map(str, shape))}-{layout}-{dtype}")
        for shape in SHAPES for layout in LAYOUTS for dtype in DTYPES for i in implementations(op)
        if i.runner.name in ("raw", "torch") and i.supports(problem_type(*shape, layout, dtype))
    ]  # fmt: skip


@pytest.mark.parametrize("implementation,shape,layout,dtype", cases("qkv_rope", QkvRopeProblem))
def test_qkv_rope(implementation, shape, layout, dtype, rng):
    tokens, heads, kv_heads, dim = shape
    x = rounded(rng.standard_normal((tokens, (heads + 2 * kv_heads) * dim)), dtype)
    shapes = [(tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    dy = [rounded(rng.standard_normal(s), dtype) for s in shapes]
    positions, inv_freq = table(tokens, dim, rng)
    runner, name = implementation.runner, implementation.kernel.name
    on = lambda t, kind: to_torch(t, kind, runner.device)  # noqa: E731
    places = [on(positions, "int32"), on(inv_freq, "fp32")]
    if runner.name == "raw":
        chosen = runner.plan(QkvRopeProblem(*shape, layout, dtype), name)
        y, dx = [runner.nan(s, dtype) for s in shapes], runner.nan(x.shape, dtype)
        runner.call(chosen, "forward", [on(x, dtype), *places, *y], chosen.attributes)
        runner.call(chosen, "backward", [*(on(t, dtype) for t in dy), *places, dx], chosen.attributes)
    else:
        leaf = on(x, dtype).requires_grad_()
        with nan_filled_memory():
            y = tp.qkv_rope(leaf, places[0], heads=heads, kv_heads=kv_heads, inv_freq=places[1], layout=layout, kernel=name,
                            fallback="allow")  # fmt: skip
            dx = torch.autograd.grad(y, leaf, [on(t, dtype) for t in dy])[0]
    wants = (*oracle.qkv_rope(x, positions, inv_freq, heads, kv_heads, layout),
             oracle.qkv_rope_backward(*dy, positions, inv_freq, layout))  # fmt: skip
    for what, got, want in zip(("q", "k", "v", "dqkv"), (*y, dx), wants, strict=True):
        assert got.is_contiguous()
        found = oracle.compare(numpy(got), want, BOUND[dtype])
        assert found.relative <= BOUND[dtype], f"{what}: {found}"


def draw(device, shape, dtype=torch.bfloat16, seed=0):
    """A QKV projection's output whose rows are apart, positions and frequencies."""
    tokens, heads, kv_heads, dim = shape
    made = torch.Generator().manual_seed(seed)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(tokens, width + 16, generator=made).to(device, dtype)[:, :width]
    positions = torch.randint(0, 100_000, (tokens,), generator=made, dtype=torch.int32).to(device)
    return qkv, positions, torch.from_numpy(oracle.rope_inv_freq(dim)).to(device)


def call(function, qkv, positions, inv_freq, shape, **options):
    return function(qkv, positions, heads=shape[1], kv_heads=shape[2], inv_freq=inv_freq, **options)


def bytes_of(x):
    return x.contiguous().view(torch.uint8)


def check_same_bytes(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(bytes_of(one), bytes_of(other))


def check_equals_rope(device, shape, layout, dtype, kernel):
    """q and k have the bytes of `rope`, v those of the input, and the gradient is put together from the same parts."""
    qkv, positions, inv_freq = draw(device, shape, dtype)
    qkv.requires_grad_()
    _, heads, kv_heads, dim = shape
    got = call(tp.qkv_rope, qkv, positions, inv_freq, shape, layout=layout, kernel=kernel)
    by_head = qkv.detach().unflatten(1, (heads + 2 * kv_heads, dim))
    where = oracle.qkv_heads(heads, kv_heads, layout)
    q, k, v = (by_head[:, place].requires_grad_() for place in where)
    want = tp.rope(q, positions, inv_freq=inv_freq), tp.rope(k, positions, inv_freq=inv_freq), v
    check_same_bytes([t.detach() for t in got], [t.detach() for t in want])
    # Gradients as attention kernels hand them on: heads first in memory.
    grads = [torch.randn_like(t.transpose(0, 1).contiguous()).transpose(0, 1) for t in want]
    dqkv = torch.autograd.grad(got, qkv, grads)[0].unflatten(1, (heads + 2 * kv_heads, dim))
    for place, one in zip(where, (*torch.autograd.grad(want[:2], (q, k), grads[:2]), grads[2]), strict=True):
        check_same_bytes([dqkv[:, place]], [one])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_parts_have_the_bytes_of_rope(layout, dtype):
    for shape in SHAPES:
        check_equals_rope("cpu", shape, layout, dtype, "separate")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_fused_kernel_has_the_bytes_of_rope(layout, dtype):
    for shape in [*SHAPES, (300, 32, 8, 128), (70, 64, 8, 128), (40, 5, 5, 80)]:
        for kernel in ("sm90", "separate"):
            check_equals_rope("cuda", shape, layout, dtype, kernel)


def fields(made: tp.QuantizedQkv):
    return [getattr(made, field.name) for field in fields_of(made)]


SCALE = (3.0, 40.0, 0.7)


def check_quantised(device, shape, layout, kernel, delayed, dtype=torch.bfloat16, pow2=False, fmt="e4m3", seed=0):
    """The bytes of qkv_rope followed by quantize, and v_t is v transposed."""
    inputs = draw(device, shape, dtype, seed)
    scale = torch.tensor(SCALE, device=device) if delayed else None
    with nan_filled_memory():
        made = call(tp.qkv_rope_quantize, *inputs, shape, layout=layout, scale=scale, pow2_scale=pow2, dtype=fmt, kernel=kernel)
    parts = call(tp.qkv_rope, *inputs, shape, layout=layout)
    alone = [quantize_2d(x.flatten(1), QuantizeOptions(fmt, pow2_scale=pow2, delayed=delayed), None if scale is None else
                         scale[i:i + 1]) for i, x in enumerate(parts)]  # fmt: skip
    data = [one.data.view(x.shape) for one, x in zip(alone, parts, strict=True)]
    v_t = data[2].view(torch.uint8).permute(1, 2, 0).contiguous().view(data[2].dtype)
    want = (*data, v_t, torch.cat([one.scale_inv for one in alone]), torch.stack([one.stats for one in alone]))
    check_same_bytes(fields(made), want)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cast", [{}, {"delayed": True}, {"pow2": True}, {"fmt": "e4m3_fnuz"}, {"fmt": "e5m2"}], ids=str)
def test_the_separate_kernels_equal_qkv_rope_followed_by_quantize(layout, cast):
    for shape in SHAPES:
        check_quantised("cpu", shape, layout, "separate", **{"delayed": False, **cast})


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cast", [{}, {"delayed": True}, {"pow2": True}], ids=str)
def test_the_fused_cast_equals_the_separate_kernels(layout, cast):
    wide = [(300, 32, 8, 128), (128, 8, 1, 64), (2049, 8, 2, 128), (7, 64, 8, 256), (16, 2, 2, 16), (40, 5, 5, 80), (0, 2, 1, 64)]
    for shape in [(33, 8, 2, 128), (17, 4, 4, 64), (5, 6, 1, 256), (130, 2, 1, 96), *wide]:
        for kernel in ("sm90", "separate"):
            check_quantised("cuda", shape, layout, kernel, **{"delayed": False, **cast})


@st.composite
def shapes(draw, dims, tokens=300):
    kv_heads = draw(st.integers(1, 8))
    return draw(st.integers(0, tokens)), kv_heads * draw(st.integers(1, 9)), kv_heads, draw(st.sampled_from(dims))


@given(shapes([2, 16, 34, 64, 128]), st.sampled_from(LAYOUTS), st.booleans(), st.integers(0, 2**32 - 1))
def test_random_sizes(shape, layout, delayed, seed):
    check_quantised("cpu", shape, layout, "auto", delayed, seed=seed)


@pytest.mark.gpu
@given(shapes([16, 32, 64, 80, 128, 256], 700), st.sampled_from(LAYOUTS), st.booleans(), st.integers(0, 2**32 - 1))
def test_random_sizes_on_a_gpu(shape, layout, delayed, seed):
    check_equals_rope("cuda", shape, layout, torch.bfloat16, "sm90")
    check_quantised("cuda", shape, layout, "sm90", delayed, seed=seed)


def test_the_codes_are_those_of_numerics(rng):
    shape = (40, 4, 2, 32)
    qkv, positions, inv_freq = draw("cpu", shape)
    made = call(tp.qkv_rope_quantize, qkv, positions, inv_freq, shape, layout="grouped")
    for part, codes, inverse, stats in zip(call(tp.qkv_rope, qkv, positions, inv_freq, shape, layout="grouped"),
                                           (made.q, made.k, made.v), made.scale_inv, made.stats, strict=True):  # fmt: skip
        x = part.float().numpy()
        scale, scale_inv = numerics.scale_from_amax(np.abs(x).max(), numerics.E4M3)
        np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), numerics.E4M3.encode(x * scale))
        assert inverse == scale_inv and stats[0] == np.abs(x).max() and stats[1] == 0
    assert torch.equal(made.v_t.view(torch.uint8), made.v.view(torch.uint8).permute(1, 2, 0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_nan_stays_in_its_part(device, delayed):
    shape = (64, 4, 2, 64)
    qkv, positions, inv_freq = draw(device, shape)
    qkv[5, 4 * 64 + 3], qkv[9, 7 * 64 + 1] = float("nan"), float("inf")  # in k: pairs with another value; in v
    scale = torch.tensor(SCALE, device=device) if delayed else None
    made = call(tp.qkv_rope_quantize, qkv, positions, inv_freq, shape, scale=scale)
    assert torch.isfinite(made.stats[0]).all() and torch.isnan(made.stats[1, 0]) and torch.isinf(made.stats[2, 0])
    assert made.stats[:, 1].tolist() == [0, 2, 1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("function", [tp.qkv_rope, lambda *a, **o: [tp.qkv_rope_quantize(*a, **o).v_t]], ids=["rope", "quantize"])
def test_rows_that_share_memory_are_read(device, function):
    shape = (32, 4, 2, 64)
    qkv, positions, inv_freq = draw(device, shape)
    same = qkv[:1].expand(32, -1)
    positions = positions.repeat_interleave(2)[::2]  # apart, too
    check_same_bytes(*(call(function, x, positions, inv_freq, shape) for x in (same, same.contiguous())))


def test_segments_give_the_positions():
    shape = (8, 2, 1, 16)
    qkv, _, inv_freq = draw("cpu", shape)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    got = tp.qkv_rope(qkv, heads=2, kv_heads=1, inv_freq=inv_freq, cu_seqlens=cu)
    check_same_bytes(got, call(tp.qkv_rope, qkv, torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]), inv_freq, shape))
    alone = call(tp.qkv_rope, qkv[3:], torch.arange(5), inv_freq, shape)
    check_same_bytes([x[3:] for x in got], alone)


def test_it_is_traced():
    shape = (12, 4, 2, 32)
    qkv, positions, inv_freq = draw("cpu", shape)
    qkv = qkv.contiguous().requires_grad_()

    def step(qkv):
        q, k, v = call(tp.qkv_rope, qkv, positions, inv_freq, shape, layout="grouped")
        return (q.float().square().sum() + k.float().sum() + v.float().cos().sum()), call(
            tp.qkv_rope_quantize, qkv, positions, inv_freq, shape)

    want, quantised = step(qkv)
    got, traced = torch.compile(step, backend="aot_eager", fullgraph=True)(qkv)
    check_same_bytes(fields(traced), fields(quantised))
    check_same_bytes(torch.autograd.grad(got, qkv), torch.autograd.grad(want, qkv))


# What is refused ------------------------------------------------------------------------------------------------------------

REFUSALS = [
    (PLAIN, "cpu", {}, "runs on sm90, not on cpu"),
    (PLAIN, "sm90", {"head_dim": 2050}, "takes head_dim up to 2048, not 2050"),
    (QUANTIZE, "cpu", {}, "runs on sm90, not on cpu"),
    (QUANTIZE, "sm90", {"split": replace(PLAIN, dtype="fp32")}, "takes bf16, not fp32"),
    (QUANTIZE, "sm90", {"format": "e5m2"}, "writes e4m3, not e5m2"),
    (QUANTIZE, "sm90", {"split": replace(PLAIN, head_dim=40)}, "takes head_dim in multiples of 16, not 40"),
    (QUANTIZE, "sm90", {"split": replace(PLAIN, head_dim=1040)}, "takes head_dim up to 1024, not 1040"),
]


@pytest.mark.parametrize("problem,arch,change,reason", REFUSALS, ids=lambda value: str(value)[:40])
def test_what_the_fused_kernel_cannot_take_is_said(problem, arch, change, reason):
    problem = replace(problem, **change)
    with pytest.raises(PlanError, match=f"kernel 'sm90' cannot run this on {arch}: {reason}"):
        plan(problem, Target(arch, "torch"), kernel="sm90")


def test_the_plan():
    for problem in (PLAIN, QUANTIZE, QkvRopeQuantizeProblem(replace(PLAIN, layout="grouped"), delayed=True)):
        made = plan(problem, TORCH_SM90)
        assert made.kernel.name == "sm90" and dict(made.rejected)["separate"] == "sm90 comes first"
    assert plan(PLAIN, Target("cpu", "torch")).note == "one after the other: rope_q cpu, rope_k cpu"
    note = "one after the other: qkv_rope separate, quantize_q cpu, quantize_k cpu, quantize_v cpu"
    assert plan(QUANTIZE, Target("cpu", "torch")).note == note
    with pytest.raises(PlanError, match="is wired for torch only"):
        plan(PLAIN, Target("cpu", "jax"))
    assert plan(PLAIN, Target("gfx942", "torch"), fallback="allow").kernel.name == "composite"
    with pytest.raises(PlanError, match="separate: has no kernel for rope_q: .*composite is framework maths"):
        plan(PLAIN, Target("gfx942", "torch"))
    with pytest.raises(PlanError, match="sm90: writes e4m3, not e4m3_fnuz"):
        plan(replace(QUANTIZE, format="e4m3_fnuz"), TORCH_SM90)


@pytest.mark.parametrize("change,message", [
    ({"layout": "mixed"}, "layout='mixed' is not one of split, grouped"),
    ({"kv_heads": 3}, "heads=32 must be a positive multiple of kv_heads=3"),
    ({"kv_heads": 0}, "heads=32 must be a positive multiple of kv_heads=0"),
    ({"head_dim": 63}, "head_dim=63 is odd"),
])  # fmt: skip
def test_problems_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **change)


def test_an_unknown_format_makes_no_sense():
    with pytest.raises(ValueError, match="FP8 format 'e3m4' is not one of"):
        replace(QUANTIZE, format="e3m4")


@pytest.mark.parametrize("change,message", [
    ({"qkv": torch.zeros(2, 30)}, "qkv has 30 columns; 2 heads of q and 1 each of k and v need a multiple of 8"),
    ({"qkv": torch.zeros(2, 12)}, "qkv has 12 columns; 2 heads of q and 1 each of k and v need a multiple of 8"),  # D = 3
    ({"qkv": torch.zeros(2, 4, 8)}, r"takes qkv\[T, \(H \+ 2G\) \* D\], got \(2, 4, 8\)"),
    ({"inv_freq": torch.zeros(8)}, r"inv_freq must be FP32\[4\] for D=8"),
    ({"inv_freq": torch.zeros(4, dtype=torch.float64)}, r"inv_freq must be FP32\[4\] for D=8"),
    ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions must be int32 or int64 \[2\], .*torch.int32\[3\]"),
    ({"positions": torch.zeros(2)}, r"positions must be int32 or int64 \[2\], one a row, got torch.float32\[2\]"),
    ({"positions": torch.zeros(2, dtype=torch.int32, device="meta")}, "positions is on meta, the tensor to work on is on cpu"),
    ({"inv_freq": torch.zeros(4, device="meta")}, "inv_freq is on meta, the tensor to work on is on cpu"),
    ({"inv_freq": torch.zeros(4, requires_grad=True)}, "inv_freq requires a gradient and would get none"),
    ({"positions": None}, r"needs positions\[T\] or cu_seqlens\[N\+1\], and not both"),
    ({"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32)}, r"needs positions\[T\] or cu_seqlens\[N\+1\], and not both"),
    ({"layout": "mixed"}, "layout='mixed' is not one of split, grouped"),
    ({"qkv": torch.zeros(2, 32, dtype=torch.float8_e4m3fn)}, "dtype torch.float8_e4m3fn is not one of"),
])  # fmt: skip
def test_arguments_that_do_not_fit(change, message):
    arguments = {"qkv": torch.zeros(2, 32), "positions": torch.zeros(2, dtype=torch.int32), "heads": 2, "kv_heads": 1,
                 "inv_freq": torch.zeros(4), **change}  # fmt: skip
    for function in (tp.qkv_rope, tp.qkv_rope_quantize):
        with pytest.raises(ValueError, match=message):
            function(**arguments)


def test_scales_that_do_not_fit():
    arguments = {"qkv": torch.zeros(2, 32), "positions": torch.zeros(2, dtype=torch.int32), "heads": 2, "kv_heads": 1,
                 "inv_freq": torch.zeros(4)}  # fmt: skip
    with pytest.raises(ValueError, match=r"scale must be FP32\[3\], those of q, k and v; got torch.float32\[1\]"):
        tp.qkv_rope_quantize(**arguments, scale=torch.ones(1))
    with pytest.raises(ValueError, match="scale is on meta, the tensor to work on is on cpu"):
        tp.qkv_rope_quantize(**arguments, scale=torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="pow2_scale chooses scales, and scale gives them"):
        tp.qkv_rope_quantize(**arguments, scale=torch.ones(3), pow2_scale=True)
    with pytest.raises(ValueError, match="FP8 format 'e3m4' is not one of"):
        tp.qkv_rope_quantize(**arguments, dtype="e3m4")
