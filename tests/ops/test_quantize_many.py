"""A list of tensors quantised together has the bytes of each quantised alone, in every kernel."""

import pytest
import torch

from te_plugin.numerics import GRANULARITIES
from te_plugin.ops.quantize.problem import QuantizeProblem
from te_plugin.ops.quantize_many.problem import QuantizeManyProblem
from te_plugin.plan import PlanError, Target, plan
from te_plugin.torch import quantize, quantize_many
from te_plugin.torch.quantize import QuantizedTensor, QuantizeOptions, quantize_2d, quantize_operand
from te_plugin.torch.quantize_many import quantize_operands

from .runners import nan_filled_memory

SHAPES = [(128, 256), (130, 260), (1, 1), (0, 64), (257, 1000), (64, 0), (3, 127), (384, 128), (160, 96), (31, 96)]
KERNELS = [pytest.param("cpu", "separate", id="separate-cpu"),
           *(pytest.param("cuda", name, id=f"{name}-cuda", marks=pytest.mark.gpu) for name in ("sm90", "separate"))]  # fmt: skip
FIELDS = ("data", "scale_inv", "data_t", "scale_inv_t", "stats")


def draw(shape, device, dtype, seed) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def tensors(device, dtype, shapes=SHAPES) -> list[torch.Tensor]:
    """Contiguous ones, rows apart (every third) and starts off 16 bytes (every fourth)."""
    made = []
    for number, (rows, columns) in enumerate(shapes):
        wide = draw((rows, columns + 24), device, dtype, number)
        first = 3 if number % 4 == 1 else 0
        x = wide[:, first:first + columns]
        made.append(x if number % 3 == 0 or first else x.contiguous())
    return made


def check_same_bytes(got: QuantizedTensor, want: QuantizedTensor) -> None:
    for name in FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype, name
            assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("device,kernel", KERNELS)
def test_every_tensor_has_the_bytes_of_quantize(device, kernel, granularity, transpose, dtype):
    xs = tensors(device, dtype)
    for pow2 in (False, True):
        with nan_filled_memory():
            made = quantize_many(xs, "e4m3", granularity, pow2_scale=pow2, transpose=transpose, kernel=kernel)
        assert len(made) == len(xs)
        for got, x in zip(made, xs, strict=True):
            check_same_bytes(got, quantize(x, "e4m3", granularity, pow2_scale=pow2, transpose=transpose))


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("device,kernel", KERNELS)
def test_given_scales_belong_to_their_tensors(device, kernel, transpose):
    xs = tensors(device, torch.bfloat16)
    scales = [torch.full((1,), 0.37 * 2.0**number, device=device) for number in range(len(xs))]
    options = QuantizeOptions("e4m3", "tensor", False, transpose, True)
    with nan_filled_memory():
        made = quantize_many(xs, scales=scales, transpose=transpose, kernel=kernel)
    for got, x, scale in zip(made, xs, scales, strict=True):
        check_same_bytes(got, quantize_2d(x, options, scale))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("device,kernel", KERNELS)
def test_values_that_are_not_finite_stay_in_their_tensor(device, kernel, granularity):
    xs = tensors(device, torch.bfloat16, [(130, 200)] * 4)
    xs[1][129, 7], xs[1][3, 199], xs[2][64, 64] = float("nan"), float("inf"), float("-inf")
    made = quantize_many(xs, "e4m3", granularity, transpose=True, kernel=kernel)
    for got, x in zip(made, xs, strict=True):
        check_same_bytes(got, quantize(x, "e4m3", granularity, transpose=True))
    assert [int(one.stats[1]) for one in made] == [0, 2, 1, 0]


@pytest.mark.parametrize("granularity", ["tensor", "row", "block_128x128"])
@pytest.mark.parametrize("device,kernel", KERNELS)
def test_lists_of_one_of_empty_tensors_and_longer_than_a_table(device, kernel, granularity):
    one = draw((200, 136), device, torch.bfloat16, 1)
    many = [draw((1 + number % 5, 8), device, torch.bfloat16, number) for number in range(600)]
    for xs in ([one], [one[:0]], [one[:0], one, one[:, :0]], many):
        for got, x in zip(quantize_many(xs, "e4m3", granularity, transpose=True, kernel=kernel), xs, strict=True):
            check_same_bytes(got, quantize(x, "e4m3", granularity, transpose=True))
    assert quantize_many([]) == []


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("device,kernel", KERNELS)
def test_experts_have_the_bytes_of_quantize_operand(device, kernel, granularity):
    weights = [draw(shape, device, torch.bfloat16, number)
               for number, shape in enumerate([(4, 96, 64), (128, 64), (4, 128, 160), (3, 130, 64), (1, 64, 64)])]  # fmt: skip
    weights[2][1, 5, 7] = float("nan")
    for transpose in (False, True):
        options = QuantizeOptions("e4m3", granularity, False, transpose, False, kernel)
        alone = QuantizeOptions("e4m3", granularity, False, transpose)
        for got, weight in zip(quantize_operands(weights, options), weights, strict=True):
            want = quantize_operand(weight, alone)
            assert got.stats.isnan().equal(want.stats.isnan()) and got.stats.nan_to_num().equal(want.stats.nan_to_num())
            got.stats = want.stats  # the payload of a NaN that torch's maximum returns is not a byte of the result
            check_same_bytes(got, want)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_traced_graph_gives_the_bytes_of_eager(delayed):
    xs = tensors("cpu", torch.bfloat16, [(64, 96), (16, 32)])
    scales = [torch.tensor([3.0]), torch.tensor([5.0])] if delayed else None
    run = lambda: [t for one in quantize_many(xs, scales=scales, transpose=True) for t in (one.data.float(), one.stats)]  # noqa: E731
    for got, want in zip(torch.compile(run, fullgraph=True, backend="eager")(), run(), strict=True):
        assert torch.equal(got, want)


X, ROW = torch.zeros(4, 8), torch.zeros(8)
REFUSALS = [
    (([X, ROW],), {}, r"tensor 1 has shape \(8,\)"),
    (([X, X.bfloat16()],), {}, "one dtype: tensor 1 has torch.bfloat16, tensor 0 has torch.float32"),
    (([X, X.to("meta")],), {}, "one device: tensor 1 has meta, tensor 0 has cpu"),
    (([X.int()],), {}, "dtype torch.int32 is not one of"),
    (([X], "e4m4"), {}, "'e4m4' is not one of e4m3"),
    (([X], "e4m3", "column"), {}, "'column' is not one of tensor, row"),
    (([], "e4m4"), {}, "'e4m4' is not one of e4m3"),
    (([], "e4m3", "column"), {}, "'column' is not one of tensor, row"),
    (([X], "e4m3", "row"), {"scales": [torch.ones(1)]}, "granularity is 'row'"),
    (([X],), {"scales": [torch.ones(1)], "pow2_scale": True}, "pow2_scale=True"),
    (([X, X],), {"scales": [torch.ones(1)]}, "1 scales for 2 tensors"),
    (([X],), {"scales": [torch.ones(2)]}, r"scale 0 is torch.float32 \(2,\) on cpu"),
    (([X],), {"kernel": "sm90"}, "runs on sm90, not on cpu"),
]


@pytest.mark.parametrize("arguments,options,message", REFUSALS, ids=lambda value: str(value)[:24])
def test_bad_input_is_refused_with_the_tensor_at_fault(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        quantize_many(*arguments, **options)


@pytest.mark.parametrize("arch,facts,kernel,reason", [
    ("sm90", {}, "sm90", None),
    ("sm90", {"granularity": "row", "transpose": True, "dtype": "fp32"}, "sm90", None),
    ("sm90", {"format": "e5m2"}, "separate", "writes e4m3, the format of weights, not e5m2"),
    ("cpu", {"format": "e4m3_fnuz"}, "separate", "runs on sm90, not on cpu"),
])  # fmt: skip
def test_the_plan_says_which_kernel_and_why(arch, facts, kernel, reason):
    problem = QuantizeManyProblem.of(QuantizeProblem(*shape, **facts) for shape in ((128, 256), (256, 128)))
    made = plan(problem, Target(arch, "torch"))
    assert made.kernel.name == kernel and not made.is_fallback
    assert reason is None or reason in dict(made.rejected)["sm90"]
    if kernel == "separate":
        assert made.note == f"one after the other: quantize {arch}"
    with pytest.raises(PlanError, match="wired for torch only"):
        plan(problem, Target(arch, "jax"))


def test_a_problem_counts_shapes_whatever_their_order():
    small, large = QuantizeProblem(2, 2), QuantizeProblem(4, 8)
    a, b = QuantizeManyProblem.of([large, small, large]), QuantizeManyProblem.of([small, large, large])
    assert a == b and a.casts == ((small, 1), (large, 2)) and [part for _, part in a.parts()] == [small, large]


@pytest.mark.parametrize("casts", [(), (QuantizeProblem(2, 2), QuantizeProblem(2, 2, granularity="row"))], ids=["none", "two"])
def test_a_problem_is_one_way_to_quantise(casts):
    with pytest.raises(ValueError, match="quantises one or more tensors in one way"):
        QuantizeManyProblem.of(casts)
