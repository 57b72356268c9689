"""Linear in every precision: the three products of every registered GEMM kernel against the float64 oracle."""

import numpy as np
import pytest
import torch

from te_plugin import oracle
from te_plugin.numerics import SCALINGS
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.torch import Linear, linear
from te_plugin.torch.state import LinearState

from .reference import rounded
from .runners import implementations, nan_filled_memory, numpy, parameter, to_torch

FEATURES = {"fp8_block": (256, 128), "mxfp8": (96, 64)}  # (N, K), multiples of what the precision needs
ROWS = [0, 1, 8, 15, 16, 17, 32, 50, 63, 64, 133]
CURRENT = [name for name, kind in SCALINGS.items() if not kind.delayed]
# The result's own rounding, plus FP32 accumulation.
BOUND = {"fp32": 3e-6, "bf16": 3e-3}
# Hopper's FP8 tensor cores keep about 14 bits while they accumulate, so an FP32 result on a GPU is no better than this.
FP8_TENSOR_CORE_BOUND = 1e-4
# Against unquantised operands, normal data. E4M3 rounds an operand by 0.026 and a product by 0.0375 whatever its scale (a block
# scale cannot go below 0.036); E5M2 gradients by 0.055.
FORMAT_BOUND = {"e4m3": 4e-2, "e5m2": 6.5e-2}


def kernels(precision: str):
    kind = SCALINGS.get(precision)
    scale = kind and kind.activation
    dtype = kind.forward_format.name if kind else "bf16"
    problem = GemmProblem(16, 16, 32, dtype, dtype, scale, kind and kind.weight)
    return [i for i in implementations("gemm") if i.runner.name == "torch" and i.supports(problem)]


def cases():
    for precision in ("fp32", "bf16", *CURRENT):
        for i in kernels(precision):
            for dtype in ("fp32",) if precision == "fp32" else ("bf16",) if precision == "bf16" else ("fp32", "bf16"):
                yield parameter(i, precision, dtype, name=f"{precision}-{dtype}")


def draw(rng, dtype, *shape):
    return rounded(rng.standard_normal(shape), dtype)


def run(implementation, x, weight, bias, dy, dtype, precision, **options):
    tx, tw, tb = (to_torch(t, dtype, implementation.runner.device).requires_grad_() for t in (x, weight, bias))
    with nan_filled_memory():
        y = linear(tx, tw, tb, precision, kernel=implementation.kernel.name, fallback="allow", **options)
        y.backward(to_torch(dy, dtype, implementation.runner.device))
    return {"y": numpy(y), "dx": numpy(tx.grad), "dw": numpy(tw.grad), "db": numpy(tb.grad)}


@pytest.mark.report("NVIDIA/TransformerEngine#2911")
@pytest.mark.parametrize("implementation,precision,dtype", list(cases()))
def test_any_number_of_rows_equals_the_oracle(implementation, precision, dtype, rng):
    features = FEATURES.get(precision, (48, 32))
    for m in ROWS:
        x, weight, bias, dy = (draw(rng, dtype, *s) for s in ((m, features[1]), features, features[:1], (m, features[0])))
        got = run(implementation, x, weight, bias, dy, dtype, precision)
        want = {
            "y": oracle.linear(x, weight, bias, precision),
            "dx": oracle.linear_dgrad(dy, weight, precision),
            "dw": oracle.linear_wgrad(dy, x, precision),
            "db": dy.sum(axis=0),
        }
        on_tensor_cores = implementation.runner.device == "cuda" and implementation.kernel.name in ("sm90", "cublaslt")
        bound = max(BOUND[dtype], FP8_TENSOR_CORE_BOUND) if on_tensor_cores else BOUND[dtype]
        for name in want:
            found = oracle.compare(got[name], want[name], bound)
            # Adding the bias rounds once more.
            assert found.relative <= 2 * bound, f"{m} rows, {name}: {found}"


@pytest.mark.parametrize("precision", CURRENT)
@pytest.mark.parametrize("pow2", [False, True])
def test_fp8_costs_no_more_than_the_format_does(precision, pow2, rng):
    kind = SCALINGS[precision]
    x, weight, dy = (draw(rng, "bf16", *s) for s in ((133, 256), (384, 256), (133, 384)))
    for implementation in kernels(precision):
        got = run(implementation, x, weight, np.zeros(384), dy, "bf16", precision, pow2_scale=pow2)
        want = {"y": x @ weight.T, "dx": dy @ weight, "dw": dy.T @ x}
        for name, exact in want.items():
            bound = FORMAT_BOUND[kind.forward_format.name if name == "y" else kind.gradient_format.name]
            assert 1e-2 < oracle.compare(got[name], exact).relative < bound, name


@pytest.mark.report("deepseek-ai/DeepGEMM#268")
@pytest.mark.parametrize("precision", ["fp8_current", "fp8_rowwise", "fp8_block"])
def test_small_and_odd_rows_with_awkward_features(precision, rng):
    shapes = [(m, 768, 128) for m in (1, 8, 16, 32, 63, 64, 133)] + [(133, 640, 256), (133, 1536, 128)]
    for m, n, k in shapes:
        x, weight, dy = (draw(rng, "bf16", *s) for s in ((m, k), (n, k), (m, n)))
        for implementation in kernels(precision):
            got = run(implementation, x, weight, np.zeros(n), dy, "bf16", precision)
            for name, want in (
                ("y", oracle.linear(x, weight, None, precision)),
                ("dw", oracle.linear_wgrad(dy, x, precision)),
            ):
                assert 1 - oracle.compare(got[name], want).cosine < 1e-5, (m, n, k, name)


@pytest.mark.report("NVIDIA/TransformerEngine#688")
def test_a_feature_size_at_fault_is_named_alone_and_rows_are_not_blamed(rng):
    x = torch.zeros(2048, 767)
    for call in (
        lambda: linear(x, torch.zeros(3072, 767), None, "fp8_current"),
        lambda: Linear(767, 3072, precision="fp8_current"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        text = str(error.value)
        assert "767" in text and "16" in text and "2048" not in text and "3072" not in text
    with pytest.raises(ValueError, match="out_features=200 is not a multiple of 128"):
        Linear(128, 200, precision="fp8_block")
    layer = Linear(512, 1024, bias=False, precision="fp8_current", dtype=torch.bfloat16)
    x = torch.from_numpy(rng.standard_normal((50, 512))).bfloat16()
    y = layer(x)
    assert y.shape == (50, 1024)
    assert oracle.compare(numpy(y), numpy(x) @ numpy(layer.weight).T).relative < FORMAT_BOUND["e4m3"]


@pytest.mark.report("NVIDIA/TransformerEngine#2911")
@pytest.mark.parametrize("precision", list(SCALINGS))
def test_marked_pad_rows_move_neither_scale_nor_gradient(precision, rng):
    n, k = FEATURES.get(precision, (64, 64))
    real, pads = 43, 5
    x, dy = draw(rng, "fp32", real + pads, k), draw(rng, "fp32", real + pads, n)
    weight = draw(rng, "fp32", n, k)
    results = []
    for rows in (slice(0, real), slice(0, real + pads)):
        padded_x, padded_dy = x.copy(), dy.copy()
        padded_x[real:], padded_dy[real:] = 1e4, 1e4
        state = LinearState(precision)
        tx = to_torch(padded_x[rows], "fp32").requires_grad_()
        tw = to_torch(weight, "fp32").requires_grad_()
        mask = torch.arange(real + pads)[rows] < real
        y = linear(tx, tw, None, precision, state=state, row_mask=mask)
        y.backward(to_torch(padded_dy[rows], "fp32") * mask[:, None])
        results.append((y.detach()[:real], tx.grad[:real], tw.grad, state.last_stats["activation"][0]))
        assert (tx.grad[real:] == 0).all()
    for short, long in zip(*results, strict=True):
        assert torch.equal(short, long)
    if not SCALINGS[precision].delayed:
        exact = np.linalg.norm(dy[:real].T @ x[:real])
        assert 0.95 < np.linalg.norm(numpy(results[1][2])) / exact < 1.05


@pytest.mark.report("NVIDIA/TransformerEngine#1596")
@pytest.mark.parametrize("keep_transpose", [True, False])
@pytest.mark.parametrize("precision", ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8"])
def test_doubling_the_weight_doubles_the_next_input_gradient_bit_for_bit(precision, keep_transpose, rng):
    layer = Linear(128, 128, bias=False, precision=precision, keep_transpose=keep_transpose)
    x, dy = (to_torch(draw(rng, "fp32", 32, 128), "fp32") for _ in range(2))
    grads = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(dy)
        grads.append(leaf.grad)
        with torch.no_grad():
            layer.weight.mul_(2)
    assert torch.equal(grads[1], 2 * grads[0]) and grads[0].abs().sum() > 0


def test_keeping_or_rebuilding_the_transposed_weight_gives_the_same_gradients(rng):
    x, dy = (to_torch(draw(rng, "fp32", 32, 128), "fp32") for _ in range(2))
    for precision in SCALINGS:
        made = []
        for keep in (True, False):
            torch.manual_seed(0)
            layer = Linear(128, 128, bias=False, precision=precision, keep_transpose=keep)
            leaf = x.clone().requires_grad_()
            layer(leaf).backward(dy)
            made.append((leaf.grad, layer.weight.grad))
        assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1]), precision


@pytest.mark.report("NVIDIA/TransformerEngine#567")
@pytest.mark.parametrize("precision", list(SCALINGS))
def test_after_load_state_dict_scales_belong_to_the_loaded_weights(precision, rng):
    layer = Linear(128, 128, bias=False, precision=precision)
    with torch.no_grad():
        layer.weight.uniform_(-0.05, 0.05)
    x = to_torch(draw(rng, "fp32", 16, 128), "fp32")
    layer(x)
    loaded = torch.from_numpy(rng.standard_normal((128, 128), dtype=np.float32)) * 4
    layer.load_state_dict({"weight": loaded}, strict=True)
    assert oracle.compare(numpy(layer(x)), numpy(x) @ numpy(loaded).T).relative < 4e-2


@pytest.mark.report("NVIDIA/TransformerEngine#567")
def test_the_first_output_after_loading_uses_the_loaded_weights_scale():
    layer = Linear(16, 16, bias=False, precision="fp8_delayed")
    with torch.no_grad():
        layer.weight.uniform_(-0.05, 0.05)
    for _ in range(3):
        layer(torch.ones(4, 16)).sum().backward()
        layer.state.advance()
    w = torch.zeros(16, 16)
    w[0, :3] = torch.tensor([4, -2, 0.1])
    layer.load_state_dict({"weight": w}, strict=True)
    x = torch.zeros(3, 16)
    x[0, 0] = x[1, 1] = x[2, 2] = 1
    np.testing.assert_allclose(layer(x)[:, 0].detach().numpy(), [4, -2, 0.0982], atol=1e-4)
    scale, made = layer.state.delayed.scale[1], layer.state.quantized_weight(layer.weight, False, False)
    assert scale == 112 and made.scale_inv.item() == np.float32(1) / np.float32(112)


@pytest.mark.report("AMD-AGI/Primus#1046")
@pytest.mark.parametrize("microbatches", [1, 2, 32])
@pytest.mark.parametrize("precision", ["fp32", "bf16", *SCALINGS])
def test_every_microbatch_reaches_main_grad_once(precision, microbatches):
    n, k = FEATURES.get(precision, (16, 16))
    state = LinearState(precision) if precision in SCALINGS else None
    weight = torch.zeros(n, k, requires_grad=True)
    weight.main_grad = torch.zeros(n, k)
    x = torch.zeros(16, k)
    x[0] = 1
    for _ in range(microbatches):
        y = linear(x.clone().requires_grad_(), weight, None, precision, state=state, accumulate_main_grad=True)
        (y * (torch.arange(16) == 0)[:, None]).sum().backward()
    assert (weight.main_grad == microbatches).all()
    assert weight.grad is None


@pytest.mark.report("ISEEKYAN/Megatron-LM#146")
@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_main_grad_adds_in_fp32(precision):
    weight = torch.zeros(16, 16, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.zeros(16, 16)
    for size in (256, 1):
        x = torch.zeros(16, 16, dtype=torch.bfloat16)
        x[0] = size
        y = linear(x, weight, None, precision, accumulate_main_grad=True)
        (y[0].sum()).backward()
    assert (weight.main_grad == 257).all()


@pytest.mark.report("NVIDIA/Megatron-LM#629")
def test_a_weight_is_quantised_once_an_optimizer_step():
    layer = Linear(32, 32, bias=False, precision="fp8_current")
    x = torch.ones(16, 32)
    for step in (1, 2):
        for _ in range(4):
            layer(x).sum().backward()
        assert layer.state.weight_casts == step
        with torch.no_grad():
            layer.weight.add_(1)
    uncached = Linear(32, 32, bias=False, precision="fp8_current", weight_cache=False)
    for _ in range(4):
        uncached(x).sum().backward()
    assert uncached.state.weight_casts == 4


@pytest.mark.report("NVIDIA/TransformerEngine#1190")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("precision", list(SCALINGS))
def test_activation_recompute_changes_neither_results_nor_state(precision, microbatches, rng):
    from torch.utils.checkpoint import checkpoint

    x = [to_torch(draw(rng, "fp32", 32, 128), "fp32") for _ in range(3 * microbatches)]
    runs = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = Linear(128, 128, precision=precision, **({"history_len": 4} if precision == "fp8_delayed" else {}))
        seen = []
        for step in range(3):
            for micro in range(microbatches):
                leaf = x[step * microbatches + micro].clone().requires_grad_()
                y = checkpoint(layer, leaf, use_reentrant=False) if recompute else layer(leaf)
                (y.square().sum() / (step + 1)).backward()
                seen += [y.detach(), leaf.grad]
            layer.state.advance()
            if layer.state.delayed is not None:
                seen += [layer.state.delayed.scale.clone(), layer.state.delayed.history.clone()]
        runs.append([*seen, layer.weight.grad])
    for plain, recomputed in zip(*runs, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_no_features_at_all_leave_the_bias(precision):
    y = linear(torch.ones(2, 3, 0), torch.ones(16, 0), torch.arange(16.0), precision)
    assert torch.equal(y, torch.arange(16.0).expand(2, 3, 16))
