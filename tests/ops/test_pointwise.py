"""Every registered RMSNorm, SwiGLU, RoPE and cross-entropy kernel against the float64 oracle."""

import numpy as np
import pytest
import torch

from te_plugin import oracle
from te_plugin.ops.activation.problem import ActivationProblem
from te_plugin.ops.loss.problem import LossProblem
from te_plugin.ops.norm.problem import NormProblem
from te_plugin.ops.rope.problem import RopeProblem
from te_plugin.plan import PlanError
from te_plugin.torch import cross_entropy, layer_norm_linear, rms_norm, rope, swiglu

from .reference import rounded
from .runners import implementations, nan_filled_memory, numpy, parameter, to_torch

DTYPES = ("fp32", "bf16", "fp16")
# One rounding of the result, which a result of five values may show whole: 2^-24, 2^-8 and 2^-11; FP32 sums add a little.
BOUND = {"fp32": 2e-6, "bf16": 4e-3, "fp16": 5e-4}


def rows(op: str, make_problem, shapes):
    return [
        parameter(i, shape, dtype, name=f"{'x'.join(map(str, shape))}-{dtype}")
        for shape in shapes
        for dtype in DTYPES
        for i in implementations(op)
        if i.supports(make_problem(shape, dtype)) and i.runner.name in ("raw", "torch")
    ]


def assert_close(got, want, dtype, what):
    found = oracle.compare(got, want, BOUND[dtype])
    assert found.relative <= BOUND[dtype], f"{what}: {found}"


def draw(rng, dtype, *shape, scale=1.0):
    return rounded(rng.standard_normal(shape) * scale, dtype)


def run_torch(implementation, function, inputs: dict, grads, dtype, **options):
    """Outputs and gradients of `function` on the named inputs; fresh memory is NaN."""
    device = implementation.runner.device
    leaves = {name: to_torch(x, dtype, device).requires_grad_() for name, x in inputs.items()}
    with nan_filled_memory():
        y = function(*leaves.values(), kernel=implementation.kernel.name, fallback="allow", **options)
        y.backward(to_torch(grads, "fp32", device).to(y.dtype))
    return numpy(y), *(numpy(x.grad) for x in leaves.values())


NORM_SHAPES = [(2, 5), (3, 7), (65, 256), (4, 4096), (130, 33), (0, 64)]


@pytest.mark.parametrize("implementation,shape,dtype", rows("norm", lambda s, d: NormProblem(*s, dtype=d), NORM_SHAPES))
def test_rms_norm(implementation, shape, dtype, rng):
    x, weight, dy = draw(rng, dtype, *shape, scale=3), draw(rng, dtype, shape[1]), draw(rng, dtype, *shape)
    want, want_rstd = oracle.rms_norm_forward(x, weight)
    want_dx, want_dw = oracle.rms_norm_backward(dy, x, weight)
    if implementation.runner.name == "raw":
        runner = implementation.runner
        chosen = runner.plan(NormProblem(*shape, dtype=dtype), implementation.kernel.name)
        tx, tw, tdy = (runner.tensor(t, dtype) for t in (x, weight, dy))
        y, rstd = runner.nan(shape, dtype), runner.nan(shape[:1], "fp32")
        dx, dw = runner.nan(shape, dtype), runner.nan(shape[1:], "fp32")
        runner.call(chosen, "forward", [tx, tw, y, rstd], [1e-5])
        runner.call(chosen, "backward", [tdy, tx, tw, rstd, dx, dw], [])
        y, dx, dw = numpy(y), numpy(dx), numpy(dw)
        assert_close(numpy(rstd), want_rstd, "fp32", "rstd")
    else:
        y, dx, dw = run_torch(implementation, rms_norm, {"x": x, "weight": weight}, dy, dtype)
    for name, got, expected in (("y", y, want), ("dx", dx, want_dx), ("dw", dw, want_dw)):
        assert_close(got, expected, dtype, name)


@pytest.mark.parametrize("implementation,shape,dtype", rows("norm", lambda s, d: NormProblem(*s, dtype=d), NORM_SHAPES))
def test_rms_norm_with_residual(implementation, shape, dtype, rng):
    """h is the sum as torch rounds it, y the norm of h, and the gradient that reaches h enters dx before the one rounding."""
    x, residual, dy, dh = (draw(rng, dtype, *shape, scale=s) for s in (3, 2, 1, 2))
    weight = draw(rng, dtype, shape[1])
    h = numpy(to_torch(x, dtype) + to_torch(residual, dtype))
    want_dx, want_dw = oracle.rms_norm_backward(dy, h, weight)
    kernel, runner = implementation.kernel.name, implementation.runner
    if runner.name == "raw":
        chosen = runner.plan(NormProblem(*shape, dtype=dtype), kernel)
        tx, tr, tw, tdy, tdh = (runner.tensor(t, dtype) for t in (x, residual, weight, dy, dh))
        y, th, plain_y, dx = (runner.nan(shape, dtype) for _ in range(4))
        rstd, dw = runner.nan(shape[:1], "fp32"), runner.nan(shape[1:], "fp32")
        runner.call(chosen, "residual_forward", [tx, tr, tw, y, th, rstd], [1e-5])
        runner.call(chosen, "residual_backward", [tdy, tdh, th, tw, rstd, dx, dw], [])
        runner.call(chosen, "forward", [th, tw, plain_y, rstd], [1e-5])
        gradients = dx, dx, dw
    else:
        tx, tr, tw = (to_torch(t, dtype, runner.device).requires_grad_() for t in (x, residual, weight))
        with nan_filled_memory():
            y, th = rms_norm(tx, tw, residual=tr, kernel=kernel, fallback="allow")
            torch.autograd.backward((y, th), tuple(to_torch(t, dtype, runner.device) for t in (dy, dh)))
        plain_y = rms_norm(th.detach(), tw.detach(), kernel=kernel, fallback="allow")
        gradients = tx.grad, tr.grad, tw.grad
    assert np.array_equal(numpy(th), h) and torch.equal(y, plain_y)
    for name, got, expected in zip(("dx", "dresidual", "dw"), gradients, (want_dx + dh, want_dx + dh, want_dw), strict=True):
        assert_close(numpy(got), expected, dtype, name)


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "return_input"])
def test_gradients_of_rms_norm_with_residual(residual, rng):
    """Each output may be used not at all, once or twice; without a residual h is x, and only its gradient is special."""
    x, r, dy, dh = (to_torch(draw(rng, "fp32", 6, 40), "fp32") for _ in range(4))
    w = to_torch(draw(rng, "fp32", 40), "fp32").requires_grad_()
    x, r = x.requires_grad_(), r.requires_grad_(residual)
    leaves = (x, r, w) if residual else (x, w)

    def run(function, use):
        y, h = function()
        loss = sum((y * dy).sum() for _ in range(use[0])) + sum((h * h * dh).sum() for _ in range(use[1]))
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    def joined():
        return rms_norm(x, w, residual=r) if residual else rms_norm(x, w, return_input=True)

    def apart():
        h = x + r if residual else x
        return rms_norm(h, w), h

    for use in ((1, 1), (1, 0), (0, 1), (2, 2)):
        for got, want in zip(run(joined, use), run(apart, use), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want)
    y, h = joined()
    assert h.data_ptr() == x.data_ptr() or residual
    assert all(torch.equal(a, b) for a, b in zip((y, h), apart(), strict=True))


def test_a_residual_that_does_not_fit_is_named():
    x, w = torch.ones(4, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"residual is torch.float32\[4, 9\], x is torch.float32\[4, 8\]; they must agree"):
        rms_norm(x, w, residual=torch.ones(4, 9))
    with pytest.raises(ValueError, match=r"residual is torch.bfloat16\[4, 8\]"):
        rms_norm(x, w, residual=x.bfloat16())


def test_tensors_on_another_device_are_named():
    """A model built on the meta device whose weights were forgotten, first of all: its op would give memory as it lies there."""
    x, w, away = torch.ones(4, 8), torch.ones(8), {"device": "meta"}
    with pytest.raises(ValueError, match="norm: weight is on meta, the tensor to work on is on cpu"):
        rms_norm(x, torch.ones(8, **away))
    with pytest.raises(ValueError, match="norm: residual is on meta"):
        rms_norm(x, w, residual=torch.ones(4, 8, **away))
    with pytest.raises(ValueError, match="cross_entropy: labels is on meta"):
        cross_entropy(x, torch.ones(4, dtype=torch.int64, **away))


@pytest.mark.parametrize(
    "implementation,shape,dtype",
    rows("activation", lambda s, d: ActivationProblem(*s, dtype=d), [(1, 1), (3, 7), (65, 384), (0, 16), (2, 1000)]),
)
def test_swiglu(implementation, shape, dtype, rng):
    x, dy = draw(rng, dtype, shape[0], 2 * shape[1], scale=4), draw(rng, dtype, *shape)
    if x.size > 2:
        x[:1, :1] = -80
    if implementation.runner.name == "raw":
        runner = implementation.runner
        chosen = runner.plan(ActivationProblem(*shape, dtype=dtype), implementation.kernel.name)
        tx, y, dx = runner.tensor(x, dtype), runner.nan(shape, dtype), runner.nan(x.shape, dtype)
        runner.call(chosen, "forward", [tx, y], [])
        runner.call(chosen, "backward", [runner.tensor(dy, dtype), tx, dx], [])
        y, dx = numpy(y), numpy(dx)
    else:
        y, dx = run_torch(implementation, swiglu, {"x": x}, dy, dtype)
    assert_close(y, oracle.swiglu_forward(x), dtype, "y")
    assert_close(dx, oracle.swiglu_backward(dy, x), dtype, "dx")


@pytest.mark.parametrize(
    "implementation,shape,dtype",
    rows("rope", lambda s, d: RopeProblem(*s, dtype=d), [(1, 1, 2), (5, 3, 64), (33, 2, 128), (9, 1, 120), (0, 2, 64)]),
)
def test_rope(implementation, shape, dtype, rng):
    x, dy = draw(rng, dtype, *shape), draw(rng, dtype, *shape)
    positions = rng.integers(0, 100_000, shape[0])
    inv_freq = oracle.rope_inv_freq(shape[2], 500000.0, factor=8.0)
    if implementation.runner.name == "raw":
        runner = implementation.runner
        chosen = runner.plan(RopeProblem(*shape, dtype=dtype), implementation.kernel.name)
        y, dx = runner.nan(shape, dtype), runner.nan(shape, dtype)
        table = [runner.tensor(positions, "int32"), runner.tensor(inv_freq, "fp32")]
        runner.call(chosen, "forward", [runner.tensor(x, dtype), *table, y], [0])
        runner.call(chosen, "backward", [runner.tensor(dy, dtype), *table, dx], [1])
        y, dx = numpy(y), numpy(dx)
    else:
        device = implementation.runner.device
        y, dx = run_torch(
            implementation, rope, {"x": x}, dy, dtype, positions=to_torch(positions, "int32", device),
            inv_freq=to_torch(inv_freq, "fp32", device),
        )  # fmt: skip
    assert_close(y, oracle.rope(x, positions, inv_freq), dtype, "y")
    assert_close(dx, oracle.rope(dy, positions, inv_freq, inverse=True), dtype, "dx")


@pytest.mark.parametrize(
    "implementation,shape,dtype",
    rows("loss", lambda s, d: LossProblem(*s, dtype=d), [(1, 1), (6, 11), (40, 384), (3, 5003), (0, 16)]),
)
def test_cross_entropy(implementation, shape, dtype, rng):
    logits, dloss = draw(rng, dtype, *shape, scale=5), rng.standard_normal(shape[0]).astype(np.float32)
    labels = rng.integers(0, shape[1], shape[0])
    labels[::3] = -100
    want, want_lse = oracle.cross_entropy_forward(logits, labels)
    if implementation.runner.name == "raw":
        runner = implementation.runner
        chosen = runner.plan(LossProblem(*shape, dtype=dtype), implementation.kernel.name)
        tl, ti = runner.tensor(logits, dtype), runner.tensor(labels, "int32")
        loss, lse, grad = runner.nan(shape[:1], "fp32"), runner.nan(shape[:1], "fp32"), runner.nan(shape, dtype)
        runner.call(chosen, "forward", [tl, ti, loss, lse], [])
        runner.call(chosen, "backward", [runner.tensor(dloss, "fp32"), tl, ti, lse, grad], [])
        loss, grad = numpy(loss), numpy(grad)
        counted = labels != -100  # lse is saved for backward only, which does not read it in ignored rows
        assert_close(numpy(lse)[counted], want_lse[counted], "fp32", "lse")
    else:
        device = implementation.runner.device
        tl = to_torch(logits, dtype, device).requires_grad_()
        with nan_filled_memory():
            y = cross_entropy(tl, to_torch(labels, "int32", device), kernel=implementation.kernel.name, fallback="allow")
            y.backward(to_torch(dloss, "fp32", device))
        loss, grad = numpy(y), numpy(tl.grad)
    assert_close(loss, want, "fp32", "loss")
    assert_close(grad, oracle.cross_entropy_backward(dloss, logits, labels), dtype, "dlogits")
    assert not loss[::3].any() and not grad[::3].any()


@pytest.mark.report("NVIDIA/Megatron-LM#453")
@pytest.mark.parametrize("heads", [1, 4])
def test_rope_of_a_packed_segment_equals_the_same_tokens_alone(heads, rng):
    inv_freq = torch.from_numpy(oracle.rope_inv_freq(64))
    x = torch.from_numpy(rng.standard_normal((5, heads, 64), dtype=np.float32))
    ids = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    for kernel in ("cpu", "composite"):
        packed = rope(x, ids, inv_freq=inv_freq, kernel=kernel)
        assert torch.equal(packed[3:], rope(x[3:], ids[3:], inv_freq=inv_freq, kernel=kernel))
        cu = torch.tensor([0, 3, 5], dtype=torch.int32)
        assert torch.equal(packed, rope(x, inv_freq=inv_freq, cu_seqlens=cu, kernel=kernel))
        assert not torch.equal(packed[3:], rope(x, torch.arange(5, dtype=torch.int32), inv_freq=inv_freq, kernel=kernel)[3:])


def test_shapes_that_do_not_fit_are_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), x has 4 features"):
        rms_norm(torch.zeros(2, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="even D"):
        rope(torch.zeros(2, 1, 3), torch.zeros(2, dtype=torch.int32), inv_freq=torch.zeros(1))
    with pytest.raises(ValueError, match=r"inv_freq must be FP32\[2\]"):
        rope(torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int32), inv_freq=torch.zeros(3))
    with pytest.raises(ValueError, match=r"rope needs positions\[T\] or cu_seqlens\[N\+1\], and not both"):
        rope(torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int32), inv_freq=torch.zeros(2), cu_seqlens=torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="leading dimensions"):
        cross_entropy(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("call", [
    lambda x: rms_norm(x, torch.ones(4, dtype=x.dtype)),
    swiglu,
    lambda x: rope(x[:, None], torch.arange(2), inv_freq=torch.ones(2)),
    lambda x: cross_entropy(x, torch.arange(2)),
], ids=["rms_norm", "swiglu", "rope", "cross_entropy"])  # fmt: skip
def test_float64_is_refused_where_float32_would_be_computed(call):
    with pytest.raises(PlanError, match="composite: takes fp32, bf16, fp16, not fp64"):
        call(torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kernel", ["auto", "composite"])
def test_an_eps_that_makes_no_sense_is_refused_by_every_kernel(kernel, eps):
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        rms_norm(torch.ones(2, 4), torch.ones(4), eps, kernel=kernel)


def test_rows_without_columns_are_legal():
    x = torch.ones(3, 0)
    y, h = rms_norm(x, torch.ones(0), residual=x)
    assert y.shape == h.shape == swiglu(x).shape == (3, 0)


@pytest.mark.report("chainer/chainer#5127")
@pytest.mark.parametrize("label", [-1, -101, 16, 2**31 - 1])
@pytest.mark.parametrize("kernel", ["cpu", "composite"])
def test_a_label_outside_the_vocabulary_is_refused_by_every_kernel_and_never_counts_as_token_0(kernel, label):
    with pytest.raises((ValueError, RuntimeError), match=f"{label}"):
        cross_entropy(torch.zeros(3, 16), torch.tensor([1, label, -100]), kernel=kernel, fallback="allow")


@pytest.mark.report("chainer/chainer#5127")
@pytest.mark.parametrize("label", [2**32 + 1, 2**32 - 100, -(2**32) + 3])
@pytest.mark.parametrize("kernel", ["cpu", "composite"])
def test_a_label_past_32_bits_does_not_wrap_into_the_vocabulary(kernel, label):
    with pytest.raises((ValueError, RuntimeError), match=str(2**31 - 1 if label > 0 else -(2**31))):
        cross_entropy(torch.zeros(2, 16), torch.tensor([1, label]), kernel=kernel, fallback="allow")


@pytest.mark.parametrize("function", [
    rms_norm, lambda x, w: layer_norm_linear(x, w, torch.ones(32, 64), precision="fp8_current")],
    ids=["norm", "norm linear"])  # fmt: skip
def test_a_norm_weight_that_is_a_column_gives_the_same(function):
    results = []
    for column in (False, True):
        x = torch.linspace(-1, 1, 16 * 64).view(16, 64).requires_grad_()
        table = torch.linspace(0.5, 2, 2 * 64).view(64, 2).requires_grad_()
        weight = table[:, 0] if column else table[:, 0].contiguous()
        y = function(x, weight)
        y.square().sum().backward()
        results.append((y, x.grad, table.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tensors_without_dimensions_are_named():
    with pytest.raises(ValueError, match=r"a norm takes x\[...,C\] and weight\[C\]; got x\(\)"):
        rms_norm(torch.tensor(1.0), torch.ones(1))
    with pytest.raises(ValueError, match="needs an even one; x has shape \\(\\)"):
        swiglu(torch.tensor(1.0))


@pytest.mark.parametrize("labels", [torch.tensor([0.5, 1.0]), torch.tensor([True, False])], ids=["float", "bool"])
def test_labels_are_integers(labels):
    with pytest.raises(ValueError, match="labels are torch"):
        cross_entropy(torch.zeros(2, 16), labels)


@pytest.mark.parametrize("kernel", ["cpu", "composite"])
def test_what_stands_in_an_ignored_row_reaches_no_gradient(kernel):
    logits = torch.zeros(2, 16)
    logits[1] = float("nan")
    logits.requires_grad_()
    cross_entropy(logits, torch.tensor([1, -100]), kernel=kernel, fallback="allow").sum().backward()
    assert torch.isfinite(logits.grad).all() and not logits.grad[1].any()


@pytest.mark.parametrize("shape", [(0,), (1, 3)])
def test_cu_seqlens_that_are_no_list_are_named(shape):
    with pytest.raises(ValueError, match="cu_seqlens has shape"):
        rope(torch.zeros(8, 2, 16), cu_seqlens=torch.zeros(shape, dtype=torch.int32), inv_freq=torch.ones(8))
