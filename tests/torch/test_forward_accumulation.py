"""forward_accumulation=fast reaches y = x W^T and no other product."""

import math
from collections import Counter

import pytest
import torch

import te_plugin.torch as tp
from te_plugin import PlanError
from te_plugin.numerics import PRECISIONS, SCALINGS
from te_plugin.oracle.metrics import compare
from te_plugin.plan import Kernel, Supported, Unsupported, register, unregister
from te_plugin.torch import gemm, launches

ABLE = ("fp8_current", "fp8_delayed", "fp8_rowwise")
ROWS, HIDDEN, FFN = 48, 128, 256


@pytest.fixture
def fast_here(monkeypatch):
    """A kernel of this test that says it adds fast, so that the CPU can tell which products ask for it."""
    say = lambda problem, target: Supported() if problem.accumulation == "fast" else Unsupported("adds fast only")  # noqa: E731
    register(Kernel("fast_here", "gemm", say))
    monkeypatch.setitem(gemm.SCALED, "fast_here", gemm.SCALED["composite"])
    yield
    unregister("gemm", "fast_here")


def draw(*shape, seed, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=torch.bfloat16)


def products(call) -> Counter:
    """How often the products of a call added in which way."""
    launches.reset()
    call()
    found = Counter()
    for row in launches.snapshot():
        if row["op"] == "gemm":
            found["fast" if "accumulation='fast'" in row["problem"] else "fp32"] += sum(row["launches"].values())
    return found


LAYERS = {
    "Linear": (lambda **o: tp.Linear(HIDDEN, FFN, **o), 1),
    "LayerNormLinear": (lambda **o: tp.LayerNormLinear(HIDDEN, FFN, **o), 1),
    "LayerNormMLP": (lambda **o: tp.LayerNormMLP(HIDDEN, FFN, **o), 2),
}


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("precision", ABLE)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_forward_product_alone_adds_fast(fast_here, layer, precision, main_grad):
    make, linears = LAYERS[layer]
    model = make(precision=precision, dtype=torch.bfloat16, forward_accumulation="fast", accumulate_main_grad=main_grad)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    x = draw(ROWS, HIDDEN, seed=1).requires_grad_()
    assert products(lambda: model(x).float().square().sum().backward()) == {"fast": linears, "fp32": 2 * linears}


@pytest.mark.parametrize("precision", ABLE)
def test_the_functions_hand_it_on_as_the_modules_do(fast_here, precision):
    x, ones = draw(ROWS, HIDDEN, seed=1), torch.ones(HIDDEN, dtype=torch.bfloat16)
    up, down = draw(2 * FFN, HIDDEN, seed=2), draw(HIDDEN, FFN, seed=3)
    state = lambda: tp.LinearState(precision)  # noqa: E731
    for call, count in (
        (lambda **o: tp.linear(x, up, precision=precision, state=state(), **o), 1),
        (lambda **o: tp.layer_norm_linear(x, ones, up, precision=precision, state=state(), **o), 1),
        (lambda **o: tp.gated_mlp(x, ones, up, down, precision=precision, states=(state(), state()), **o), 2),
    ):
        assert products(lambda call=call: call(forward_accumulation="fast")) == {"fast": count}
        assert products(call) == {"fp32": count}


def test_a_compiled_layer_asks_for_it_too(fast_here):
    model = tp.Linear(HIDDEN, FFN, precision="fp8_current", forward_accumulation="fast")
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert products(lambda: compiled(x).sum().backward()) == {"fast": 1, "fp32": 2}


def test_converted_layers_ask_for_it(fast_here):
    model = torch.nn.Sequential(torch.nn.RMSNorm(HIDDEN), torch.nn.Linear(HIDDEN, FFN))
    tp.convert(model, "fp8_current", forward_accumulation="fast")
    assert products(lambda: model(torch.randn(ROWS, HIDDEN))) == {"fast": 1}


def test_where_every_kernel_adds_in_fp32_it_is_refused_with_the_reason():
    for fallback in ("error", "allow"):
        with pytest.raises(PlanError, match="composite: adds in FP32, and accumulation=fast was asked for"):
            tp.linear(torch.randn(ROWS, HIDDEN), torch.randn(FFN, HIDDEN), None, "fp8_current", forward_accumulation="fast",
                      fallback=fallback)  # fmt: skip


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name not in ABLE])
def test_a_precision_without_it_is_refused_where_it_is_given(precision):
    x, w = torch.randn(ROWS, HIDDEN), torch.randn(FFN, HIDDEN)
    why = "blocks are scaled and added in FP32" if precision in SCALINGS else "only FP8 products have a fast mode"
    for call in (
        lambda **o: tp.linear(x, w, **o), lambda **o: tp.layer_norm_linear(x, torch.ones(HIDDEN), w, **o),
        lambda **o: tp.gated_mlp(x, torch.ones(HIDDEN), w, torch.randn(HIDDEN, HIDDEN), **o),
        *(make for make, _ in LAYERS.values()), lambda **o: tp.convert(torch.nn.Sequential(torch.nn.RMSNorm(HIDDEN)), **o),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"forward_accumulation=fast with precision={precision}: .*{why}.* one of "
                                             f"{', '.join(ABLE)}"):
            call(precision=precision, forward_accumulation="fast")


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_an_unknown_way_to_add_is_refused(precision):
    with pytest.raises(ValueError, match="forward_accumulation='bf16' is not one of fp32, fast"):
        tp.linear(torch.randn(ROWS, HIDDEN), torch.randn(FFN, HIDDEN), None, precision, forward_accumulation="bf16")


def bound(k: int) -> float:
    """Relative error of a fast sum over k of random terms, and of its rounding to BF16 (2e-3).

    Every 32 terms are added to the sum in one step, all cut to 13 binary digits below the largest of them: 33 cuts of at most
    2^-13 of the sum, independent of each other, are an error of sqrt(33 / 12) * 2^-13 at most in a step. Over k / 32 steps errors
    add up as their squares do; 2^-12 sqrt(k / 32) is a little above that.
    """
    return 2**-12 * math.sqrt(k / 32) + 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ABLE)
@pytest.mark.parametrize("k", [256, 2048, 4096, 14336])
def test_on_hopper_only_the_forward_differs_and_within_what_14_bits_cost(precision, k):
    m, n = 512, 384
    x, w, dy = draw(m, k, seed=1, device="cuda"), draw(n, k, seed=2, device="cuda"), draw(m, n, seed=3, device="cuda")
    found = {}
    for accumulation in ("fp32", "fast"):
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        state = tp.LinearState(precision, device="cuda")
        y = tp.linear(leaf, weight, None, precision, state=state, forward_accumulation=accumulation, kernel="cublaslt")
        y.backward(dy)
        found[accumulation] = (y.detach().double().cpu().numpy(), leaf.grad, weight.grad)
    granularity = SCALINGS[precision].activation
    exact = (tp.quantize(x, "e4m3", granularity).dequantize().double()
             @ tp.quantize(w, "e4m3", granularity).dequantize().double().t()).cpu().numpy()  # fmt: skip
    errors = {name: compare(y, exact).relative for name, (y, *_) in found.items()}
    assert errors["fp32"] < 2e-3 and errors["fast"] < bound(k), errors
    assert 0 < compare(found["fast"][0], found["fp32"][0]).relative < bound(k)
    assert k < 4096 or errors["fast"] > errors["fp32"], "the fast mode was not taken"
    for fast, precise in zip(found["fast"][1:], found["fp32"][1:], strict=True):
        assert torch.equal(fast, precise)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_on_hopper_the_planned_kernel_is_cublaslts_and_the_record_says_so(layer):
    make, linears = LAYERS[layer]
    model = make(precision="fp8_current", dtype=torch.bfloat16, device="cuda", forward_accumulation="fast")
    x = draw(ROWS, HIDDEN, seed=1, device="cuda").requires_grad_()
    assert products(lambda: model(x).float().square().sum().backward()) == {"fast": linears, "fp32": 2 * linears}
    rows = [row for row in launches.snapshot() if "accumulation='fast'" in row["problem"]]
    assert {(row["kernel"], row["note"]) for row in rows} == {("cublaslt", "fast accumulation")}
