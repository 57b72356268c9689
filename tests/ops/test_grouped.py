"""Grouped linear: every registered kernel against the loop over experts, with empty groups and poisoned surplus rows."""

import sys

import numpy as np
import pytest
import torch

from te_plugin import oracle
from te_plugin.numerics import SCALINGS
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.plan import PlanError, Target, plan, registered
from te_plugin.torch import GroupedLinear, LinearState, align_groups, grouped_gemm, grouped_linear
from te_plugin.torch.quantize import QuantizeOptions, dequantize, quantize_2d, quantize_experts

from .reference import rounded
from .runners import TORCH_DTYPE, implementations, nan_filled_memory, numpy, parameter, to_torch

# (rows, group sizes): surplus rows lie behind the last group.
GROUPS = [
    (7, [3, 0, 4]),
    (9, [0, 0, 7]),
    (7, [7, 0, 0]),
    (5, [0, 0, 0]),
    (0, [0, 0]),
    (130, [130]),
    (200, [1, 64, 0, 63, 65, 2]),
    (80, [5, 0, 32, 33]),
    (192, [128, 0, 64]),
    (300, [44, 128, 127]),
]
PRECISIONS = ["fp32", "bf16", *(name for name, kind in SCALINGS.items() if not kind.delayed)]
FEATURES = {"fp8_block": (256, 128), "mxfp8": (96, 64)}
BOUND = {"fp32": 3e-6, "bf16": 4e-3}
# FP8 tensor cores keep about 14 bits of a sum over 128 values, whatever the output is.
TENSOR_CORE_BOUND = 2e-3


def bound(implementation, precision: str, dtype: str) -> float:
    on_tensor_cores = precision in SCALINGS and "scaled" in implementation.kernel.entry_points
    return max(BOUND[dtype], TENSOR_CORE_BOUND) if on_tensor_cores else BOUND[dtype]


def stages(rows: int, n: int, k: int, groups: int, dtype: str, precision: str) -> list[GroupedGemmProblem]:
    """The three products of a call; on a GPU the rows are padded to what FP8 tensor cores sum over."""
    sizes = {"forward": (n, k), "dgrad": (k, n), "wgrad": (n, k)}
    return [GroupedGemmProblem(rows, *pair, groups, dtype, precision, stage) for stage, pair in sizes.items()]


USABLE = implementations("grouped_gemm", GroupedGemmProblem(7, 48, 32, 3, "fp32", "fp32"))


def grid():
    for rows, sizes in GROUPS:
        for precision in PRECISIONS:
            dtype = "bf16" if precision == "bf16" else "fp32"
            n, k = FEATURES.get(precision, (48, 32))
            for i in implementations("grouped_gemm"):
                held = -(-rows // 16) * 16 if i.runner.device == "cuda" else rows
                problems = stages(held, n, k, len(sizes), dtype, precision)
                if i.runner.name == "torch" and all(i.supports(problem) for problem in problems):
                    yield parameter(i, rows, sizes, precision, dtype, name=f"{precision}-{rows}-{sizes}".replace(" ", ""))


def run(implementation, x, weight, sizes, dy, precision, dtype, index="int32"):
    device = implementation.runner.device
    tx, tw = (to_torch(t, dtype, device).requires_grad_() for t in (x, weight))
    groups = torch.tensor(sizes, dtype=getattr(torch, index), device=device)
    with nan_filled_memory():
        y = grouped_linear(tx, tw, groups, precision, kernel=implementation.kernel.name, fallback="allow")
        y.backward(to_torch(dy, dtype, device))
    return {"y": numpy(y), "dx": numpy(tx.grad), "dw": numpy(tw.grad)}


@pytest.mark.report("tgale96/grouped_gemm#36")
@pytest.mark.report("NVIDIA/TransformerEngine#2966")
@pytest.mark.report("deepseek-ai/DeepGEMM#38")
@pytest.mark.parametrize("implementation,rows,sizes,precision,dtype", list(grid()))
def test_grouped_linear_is_the_loop_over_experts(implementation, rows, sizes, precision, dtype, rng):
    n, k = FEATURES.get(precision, (48, 32))
    x, weight, dy = (rounded(rng.standard_normal(s), dtype) for s in ((rows, k), (len(sizes), n, k), (rows, n)))
    used = sum(sizes)
    x[used:], dy[used:] = np.nan, np.nan
    want = {"y": oracle.grouped_linear(x, weight, sizes, precision)}
    want["dx"], want["dw"] = oracle.grouped_linear_backward(dy, x, weight, sizes, precision)
    got = run(implementation, x, weight, sizes, dy, precision, dtype)
    for name in want:
        limit = bound(implementation, precision, dtype)
        found = oracle.compare(got[name], want[name], limit)
        assert found.relative <= limit, f"{name}: {found}"
    for e, size in enumerate(sizes):
        assert size or (got["dw"][e] == 0).all(), f"dW of the empty expert {e}"
    assert (got["y"][used:] == 0).all() and (got["dx"][used:] == 0).all()


@pytest.mark.report("tgale96/grouped_gemm#36")
@pytest.mark.parametrize("implementation", [i for i in USABLE if i.runner.name == "torch"], ids=str)
def test_an_empty_expert_gives_the_same_finite_bits_ten_times(implementation, rng):
    x, weight, dy = (rng.standard_normal(s, dtype=np.float32) for s in ((7, 32), (3, 48, 32), (7, 48)))
    first = run(implementation, x, weight, [4, 0, 3], dy, "bf16", "fp32")
    for _ in range(9):
        again = run(implementation, x, weight, [4, 0, 3], dy, "bf16", "fp32", index="int64")
        for name in first:
            assert np.isfinite(first[name]).all() and np.array_equal(first[name], again[name])
    assert (first["dw"][1] == 0).all()


@pytest.mark.parametrize("implementation", [i for i in USABLE if i.runner.name == "raw"], ids=str)
def test_exported_products_write_every_element_and_accumulate_exactly_once(implementation, rng):
    runner = implementation.runner
    for dtype in ("fp32", "bf16"):
        sizes, rows, n, k = [3, 0, 64, 5], 80, 48, 33
        x, b, dy = (rounded(rng.standard_normal(s), dtype) for s in ((rows, k), (4, n, k), (rows, n)))
        x[72:], dy[72:] = np.nan, np.nan
        plan = runner.plan(GroupedGemmProblem(rows, n, k, 4, dtype), implementation.kernel.name)
        tx, tb, tdy, groups = *(runner.tensor(t, dtype) for t in (x, b, dy)), runner.tensor(np.array(sizes), "int32")
        y, dw = runner.nan((rows, n), dtype), runner.nan((4, n, k), "fp32")
        wgrad = runner.plan(GroupedGemmProblem(rows, n, k, 4, dtype, stage="wgrad"), implementation.kernel.name)
        runner.call(plan, "forward", [tx, tb, groups, y], [])
        runner.call(wgrad, "wgrad", [tdy, tx, groups, dw], [0])
        want = oracle.grouped_gemm_wgrad(dy, x, sizes)
        assert oracle.compare(numpy(y), oracle.grouped_gemm(x, b, sizes)).relative <= BOUND[dtype]
        assert oracle.compare(numpy(dw), want).relative <= 1e-6
        runner.call(wgrad, "wgrad", [tdy, tx, groups, dw], [1])
        assert oracle.compare(numpy(dw), 2 * want).relative <= 1e-6
        assert (numpy(dw)[1] == 0).all()


@pytest.mark.report("pytorch/torchtitan#1237")
def test_aligning_groups_then_computing_equals_the_loop(rng):
    counts = torch.tensor([299, 254, 158, 278, 167, 343, 263, 286])
    assert [int(align_groups(counts, m).sum()) for m in (8, 16, 32)] == [2064, 2096, 2144]
    assert align_groups(torch.tensor([5, 0, 32, 33]), 32).tolist() == [32, 0, 32, 64]
    assert align_groups(torch.tensor([44]), 32).tolist() == [64]
    sizes = torch.tensor([5, 0, 32, 33])
    x, weight = (torch.from_numpy(rng.standard_normal(s, dtype=np.float32)) for s in ((70, 32), (4, 16, 32)))
    aligned = align_groups(sizes, 32)
    padded = torch.full((int(aligned.sum()) + 9, 32), float("nan"))
    rows, begin, start = [], 0, 0
    for size, room in zip(sizes.tolist(), aligned.tolist(), strict=True):
        padded[start : start + room] = 0
        padded[start : start + size] = x[begin : begin + size]
        rows += range(start, start + size)
        begin, start = begin + size, start + room
    for kernel in ("cpu", "composite"):
        y = grouped_linear(padded, weight, aligned, "bf16", kernel=kernel)[rows]
        loop = torch.cat([x[a:b] @ weight[e].T for e, (a, b) in enumerate([(0, 5), (5, 5), (5, 37), (37, 70)])])
        torch.testing.assert_close(y, loop, rtol=1e-5, atol=1e-5)


def test_permute_grouped_linear_unpermute_equals_the_loop_over_tokens(rng):
    tokens, experts, top_k = 37, 4, 2
    x = torch.from_numpy(rng.standard_normal((tokens, 32), dtype=np.float32)).requires_grad_()
    weight = torch.from_numpy(rng.standard_normal((experts, 16, 32), dtype=np.float32)).requires_grad_()
    chosen = torch.from_numpy(np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]))
    gate = torch.from_numpy(rng.random((tokens, top_k), dtype=np.float32)).requires_grad_()
    order = torch.argsort(chosen.flatten(), stable=True)
    sizes = torch.bincount(chosen.flatten(), minlength=experts)
    y = grouped_linear(x[order // top_k], weight, sizes)
    out = torch.zeros(tokens * top_k, 16).index_copy(0, order, y).view(tokens, top_k, 16)
    out = (out * gate[..., None]).sum(1)
    want = torch.stack([sum(gate[t, j] * (weight[chosen[t, j]] @ x[t]) for j in range(top_k)) for t in range(tokens)])
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    probe = torch.from_numpy(rng.standard_normal(want.shape, dtype=np.float32))
    got, expected = (torch.autograd.grad((o * probe).sum(), (x, weight, gate)) for o in (out, want))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.report("deepseek-ai/DeepGEMM#38")
@pytest.mark.parametrize("kernel", ["cpu", "composite"])
def test_group_sizes_that_cannot_be_are_refused(kernel):
    x, weight = torch.zeros(8, 32), torch.zeros(3, 16, 32)
    for sizes in ([4, -1, 2], [4, 4, 4]):
        with pytest.raises(ValueError, match="group_sizes"):
            grouped_linear(x, weight, torch.tensor(sizes), kernel=kernel)
    with pytest.raises(ValueError, match="3 experts"):
        grouped_linear(x, weight, torch.tensor([4, 4]), kernel=kernel)
    with pytest.raises(ValueError, match="int32 or int64"):
        grouped_linear(x, weight, torch.tensor([4.0, 4.0, 0.0]), kernel=kernel)
    with pytest.raises(ValueError, match="int32 or int64 tensor on cpu, got list"):
        grouped_linear(x, weight, [4, 4, 0], kernel=kernel)
    with pytest.raises(ValueError, match="in_features=40 is not a multiple of 16"):
        grouped_linear(torch.zeros(8, 40), torch.zeros(3, 16, 40), torch.tensor([4, 0, 0]), "fp8_current", kernel=kernel)
    with pytest.raises(ValueError, match="history per tensor"):
        grouped_linear(x, weight, torch.tensor([4, 0, 4]), "fp8_delayed", kernel=kernel)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_main_grad_of_experts_adds_each_microbatch_once(precision):
    weight = torch.zeros(3, 16, 32, requires_grad=True)
    weight.main_grad = torch.zeros(3, 16, 32)
    for _ in range(4):
        y = grouped_linear(torch.ones(7, 32), weight, torch.tensor([4, 0, 3]), precision, accumulate_main_grad=True)
        y.sum().backward()
    assert [float(weight.main_grad[e].unique()) for e in range(3)] == [16, 0, 12]
    assert weight.grad is None


FP8 = ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8"]


def fp8_case(rng, precision, rows=200, sizes=(60, 0, 100)):
    n, k = FEATURES.get(precision, (48, 32))
    x, weight, dy = (torch.from_numpy(rng.standard_normal(s, dtype=np.float32)) for s in ((rows, k), (3, n, k), (rows, n)))
    return x, weight.requires_grad_(), dy, torch.tensor(sizes)


@pytest.mark.parametrize("precision", FP8)
def test_copies_of_experts_share_no_memory(precision):
    """A graph of torch.compile may not have outputs that alias; the scales of one block look the same either way round."""
    kind = SCALINGS[precision]
    made = quantize_experts(torch.ones(2, 128, 128), QuantizeOptions(kind.forward_format.name, kind.weight, False, True))
    tensors = (made.data, made.scale_inv, made.data_t, made.scale_inv_t, made.stats)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 5


@pytest.mark.parametrize("precision", ["bf16", *FP8])
def test_weights_that_lie_the_other_way_round_give_the_same(precision):
    """Models that hold [E,K,N] hand in a view."""
    results = []
    for turned in (False, True):
        x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
        weight = torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        view = weight.transpose(1, 2).contiguous().transpose(1, 2) if turned else weight
        y = grouped_linear(x, view, torch.tensor([3, 0, 5]), precision)
        y.square().sum().backward()
        results.append((y, x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("large", [False, True], ids=["at-once", "one-by-one"])
@pytest.mark.parametrize("precision", FP8)
def test_experts_are_quantised_as_each_of_them_alone(precision, large, rng, monkeypatch):
    monkeypatch.setattr(sys.modules["te_plugin.torch.quantize"], "LARGE_EXPERT", 1 if large else 1 << 22)
    kind = SCALINGS[precision]
    weight = torch.from_numpy(rng.standard_normal((3, *FEATURES.get(precision, (48, 32))), dtype=np.float32))
    weight[1] *= 100
    made = quantize_experts(weight, QuantizeOptions(kind.forward_format.name, kind.weight, False, True))
    for e in range(3):
        alone = quantize_2d(weight[e], QuantizeOptions(kind.forward_format.name, kind.weight, False, True))
        for name in ("data", "data_t"):
            assert torch.equal(getattr(made, name)[e].view(torch.uint8), getattr(alone, name).view(torch.uint8)), name
        for name in ("scale_inv", "scale_inv_t"):
            assert torch.equal(getattr(made, name)[e].reshape(-1), getattr(alone, name).reshape(-1)), name
        assert getattr(made, name).shape[0] == 3 and made.data_t.shape == weight.transpose(1, 2).shape
    assert made.stats.tolist() == [float(weight.abs().max()), 0]
    weight[2, 3, 5] = float("nan")
    poisoned = quantize_experts(weight, QuantizeOptions(kind.forward_format.name, kind.weight, False, False)).stats
    assert poisoned[0].isnan() and poisoned[1] == 1


@pytest.mark.parametrize("precision", FP8)
def test_weights_of_experts_are_quantised_once_a_step(precision, rng):
    x, weight, dy, sizes = fp8_case(rng, precision)
    state = LinearState(precision)
    grads = []
    for _ in range(3):
        weight.grad = None
        grouped_linear(x, weight, sizes, precision, state=state).backward(dy)
        grads.append(weight.grad)
    assert state.weight_casts == 1 and torch.equal(grads[0], grads[2])
    with torch.no_grad():
        weight.mul_(2)
    y = grouped_linear(x, weight, sizes, precision, state=state)
    assert state.weight_casts == 2
    assert torch.equal(y, grouped_linear(x, weight, sizes, precision))
    with pytest.raises(ValueError, match="state belongs to precision"):
        grouped_linear(x, weight, sizes, "fp8_rowwise" if precision == "fp8_current" else "fp8_current", state=state)


@pytest.mark.parametrize("precision", FP8)
def test_rebuilt_transposes_give_the_same_gradients(precision, rng):
    x, weight, dy, sizes = fp8_case(rng, precision)
    x.requires_grad_()
    grads = [torch.autograd.grad(grouped_linear(x, weight, sizes, precision, keep_transpose=keep), (x, weight), dy)
             for keep in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("precision", FP8)
def test_main_grad_of_fp8_experts_is_their_gradient_added_once_a_call(precision, rng):
    x, weight, dy, sizes = fp8_case(rng, precision)
    grouped_linear(x, weight, sizes, precision).backward(dy)
    want, weight.grad = weight.grad, None
    weight.main_grad = torch.ones(weight.shape)
    for _ in range(2):
        grouped_linear(x, weight, sizes, precision, accumulate_main_grad=True).backward(dy)
    torch.testing.assert_close(weight.main_grad, 1 + 2 * want, rtol=1e-5, atol=1e-5)
    assert weight.grad is None and (weight.main_grad[1] == 1).all()


def the_sm90_contract(calls):
    """A stand-in for the sm90 library: the argument checks of csrc/sm90/gemm.cu, and products of the dequantised operands."""

    def scales_of(data, scale, granularity, format):
        blocks = -(-data.shape[-1] // 128)
        want = {"tensor": (1,), "row": data.shape[:1], "block_1x128": (data.shape[0], blocks)}[granularity]
        assert tuple(scale.shape) == tuple(want) and scale.dtype == torch.float32
        return dequantize(data, scale, granularity, format)

    def launch(plan, stage, *arguments):
        problem, kind = plan.problem, SCALINGS[plan.problem.precision]
        calls.append((stage, problem.stage))
        if stage == "scaled":
            a, b, scale_a, scale_b, sizes, c, *codes = arguments
            e, n, k = b.shape
            want = {"tensor": (e,), "row": (e, n), "block_128x128": (e, -(-n // 128), -(-k // 128))}[kind.weight]
            assert tuple(scale_b.shape) == want
        else:
            a, b, scale_a, scale_b, sizes, c, *codes, accumulate = arguments
            assert accumulate == 0 and a.shape[1] == b.shape[1] and a.shape[1] % 16 == 0 and c.shape[1:] == (len(a), len(b))
        formats = [t.dtype for t in (a, b)]
        (format_a, grain_a), (format_b, grain_b) = problem.operands()
        assert all(t.is_contiguous() for t in (a, b, scale_a, scale_b, c)) and isinstance(sizes, torch.Tensor)
        assert formats == [TORCH_DTYPE[format_a], TORCH_DTYPE[format_b]] and len(codes) == 3
        scale_kind = {"tensor": 0, "row": 1}.get(grain_a, 3 if grain_a == grain_b else 2)
        assert codes == [{"e4m3": 0, "e5m2": 1}[format_a], 0, scale_kind]
        left = scales_of(a, scale_a, grain_a, format_a)
        if stage == "scaled":
            scale_b = scale_b[:, None] if grain_b == "tensor" else scale_b
            right = [dequantize(w, s, grain_b, format_b).numpy() for w, s in zip(b, scale_b, strict=True)]
            c.copy_(torch.from_numpy(oracle.grouped_gemm(left.numpy(), np.stack(right), sizes.numpy())))
        else:
            right = scales_of(b, scale_b, grain_b, format_b)
            c.copy_(torch.from_numpy(oracle.grouped_gemm_wgrad(left.t().numpy(), right.t().numpy(), sizes.numpy())))

    return launch


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_rowwise", "fp8_block"])
def test_the_sm90_kernels_are_given_what_they_ask_for(precision, rng, monkeypatch):
    x, weight, dy, sizes = fp8_case(rng, precision, rows=208)
    x[160:], dy[160:] = np.nan, np.nan
    x.requires_grad_()
    want = torch.autograd.grad(grouped_linear(x, weight, sizes, precision), (x, weight), dy)
    sm90 = next(kernel for kernel in registered("grouped_gemm") if kernel.name == "sm90")
    calls = []

    def planned_for_a_gpu(m, n, k, groups, dtype, device, key):
        o = grouped_gemm.GroupedGemmOptions.from_key(key)
        return plan(GroupedGemmProblem(m, n, k, groups, dtype, o.precision, o.stage), Target("sm90", "torch"), sm90.name)

    monkeypatch.setattr(grouped_gemm, "_plan", planned_for_a_gpu)
    monkeypatch.setattr(grouped_gemm, "launch", the_sm90_contract(calls))
    got = torch.autograd.grad(grouped_linear(x, weight, sizes, precision), (x, weight), dy)
    assert calls == [("scaled", "forward"), ("scaled", "dgrad"), ("scaled_wgrad", "wgrad")]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("problem", "reason"), [
    (GroupedGemmProblem(64, 32, 32, 4, "bf16", "mxfp8"), "no such tensor cores"),
    (GroupedGemmProblem(64, 32, 32, 4, "bf16", "fp8_delayed"), "takes no fp8_delayed"),
    (GroupedGemmProblem(64, 32, 32, 300, "bf16", "fp8_rowwise"), "300 groups are more than 256"),
    (GroupedGemmProblem(64, 32, 40, 4, "bf16", "fp8_current"), "k=40, over which forward sums, is not a multiple of 16"),
    (GroupedGemmProblem(60, 32, 32, 4, "bf16", "fp8_block", "wgrad"), "m=60, over which wgrad sums, is not a multiple of 16"),
    (GroupedGemmProblem(64, 32, 32, 4, "fp16", "fp8_current"), "takes bf16, fp32, not fp16"),
    (GroupedGemmProblem(64, 32, 32, 4, "fp32", "fp32"), "takes bf16, not fp32"),
])
def test_what_the_sm90_kernel_cannot_do_is_said(problem, reason):
    with pytest.raises(PlanError, match=reason):
        plan(problem, "sm90", kernel="sm90")


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_rowwise", "fp8_block"])
def test_every_stage_is_planned_for_sm90(precision):
    for problem in stages(64, 256, 128, 8, "bf16", precision):
        assert plan(problem, "sm90").kernel.name == "sm90"


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_rowwise", "fp8_block"])
def test_no_group_size_is_read_on_the_host(precision, rng, monkeypatch):
    """On the way to the sm90 kernels; a read would stall the GPU in every layer and cannot be captured in a CUDA graph."""
    x, weight, dy, sizes = fp8_case(rng, precision, rows=208)
    x.requires_grad_()
    grouped_linear(x, weight, sizes, precision).backward(dy)  # plans are made by now
    calls = []

    def launch(plan, stage, *arguments):
        calls.append(stage)
        arguments[5].zero_()

    def forbidden(*_):
        raise AssertionError("group sizes were read on the host")

    monkeypatch.setattr(grouped_gemm, "_plan", lambda *a: plan(
        GroupedGemmProblem(*a[:5], *a[6].replace("'", "").split(";")[:2]), Target("sm90", "torch")))
    monkeypatch.setattr(grouped_gemm, "launch", launch)
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__index__", "__float__"):
            patch.setattr(torch.Tensor, name, forbidden)
        grouped_linear(x, weight, sizes, precision).backward(dy)
    assert calls == ["scaled", "scaled", "scaled_wgrad"]


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_rowwise", "fp8_block"])
def test_a_captured_graph_follows_group_sizes_that_change_on_the_device(precision):
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((512, 256), (4, 384, 256), (512, 384)))
    x.requires_grad_()
    weight.requires_grad_()
    sizes = torch.tensor([100, 0, 300, 7], device="cuda")
    state = LinearState(precision) if precision != "bf16" else None

    def step():
        y = grouped_linear(x, weight, sizes, precision, state=state)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for new in ([100, 0, 300, 7], [0, 512, 0, 0], [1, 2, 3, 4], [128, 128, 128, 128]):
        sizes.copy_(torch.tensor(new))
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_the_layer_of_experts_adds_to_main_grad_as_the_function_does(precision):
    layer = GroupedLinear(2, 64, 64, precision=precision, accumulate_main_grad=True)
    layer.weight.main_grad = torch.zeros(2, 64, 64)
    for _ in range(2):
        layer(torch.ones(8, 64), torch.tensor([8, 0])).sum().backward()
    assert (layer.weight.main_grad[0] == 16).all() and not layer.weight.main_grad[1].any() and layer.weight.grad is None
