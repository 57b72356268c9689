"""Run each planned kernel on a recipe's shapes against the float64 oracle: what `te-plugin check` does.

Inputs are random; segments are those of the recipe's first microbatch. Attention is compared per segment for the first and the
last kv head (heads are independent). Products too large for a float64 reference in seconds are checked on their first rows,
and the row says how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from te_plugin import numerics, oracle
from te_plugin.config import Config, ConfigError
from te_plugin.ops.recipe import plan_run, problems_of, run_dtype, run_target
from te_plugin.oracle.metrics import compare

PRODUCT_LIMIT = 2e11  # floating-point operations of one float64 reference product
BOUNDS = {"fp32": {"attention": 2e-6, "gradient": 4e-6, "pointwise": 2e-6, "linear": 2e-5},
          "bf16": {"attention": 5e-3, "gradient": 1e-2, "pointwise": 5e-3, "linear": 8e-3}}


@dataclass(frozen=True)
class Row:
    """One comparison. where: the segment or the rows compared; error: relative, against float64."""

    label: str
    kernel: str
    output: str
    where: str
    error: float
    cosine: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # a NaN is not


def check(cfg: Config) -> Iterator[Row]:
    """Every comparison of a recipe, as it is made. PlanError when an op of the recipe has no kernel."""
    if cfg.adapter.name != "megatron":
        raise ConfigError(f"check runs kernels through torch, which adapter={cfg.adapter.name} does not use; both adapters share "
                          f"the compiled kernels: check with adapter=megatron")
    plans = plan_run(cfg)
    device = torch.device("cuda" if run_target(cfg).is_gpu else "cpu")
    rng = np.random.default_rng(cfg.run.seed)
    problems = dict(problems_of(cfg))
    for label, problem in problems.items():
        kernel = plans[label].kernel.name
        if problem.op == "attention":
            yield from _attention(cfg, label, kernel, problem, rng, device)
        elif problem.op in _POINTWISE:
            yield from _POINTWISE[problem.op](cfg, label, kernel, problem, rng, device)
        elif problem.op == "gemm" and label.endswith(".forward"):
            yield from _linear(cfg, label.removesuffix(".forward"), kernel, problem, rng, device)
        elif problem.op == "grouped_gemm" and label.endswith(".forward"):
            yield from _experts(cfg, label.removesuffix(".forward"), kernel, problem, rng, device)


class _Draw:
    """Random arrays already rounded to a dtype, so that kernel and oracle read the same values."""

    def __init__(self, dtype: str, rng, device):
        self.dtype, self.rng, self.device = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], rng, device

    def __call__(self, *shape: int, grad: bool = False) -> torch.Tensor:
        values = torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32))
        return values.to(self.device, self.dtype).requires_grad_(grad)


def _f64(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()


def _row(label, kernel, output, where, got, want, bound) -> Row:
    found = compare(got, want)
    return Row(label, kernel, output, where, found.relative, found.cosine, bound)


def _attention(cfg, label, kernel, problem, rng, device) -> Iterator[Row]:
    import te_plugin.torch as tp
    from te_plugin.data import build_data

    batch = build_data(cfg).train_batch(0, cfg.schedule.micro_rows)
    cu, start = batch.cu_seqlens, batch.cu_seqlens_padded
    draw = _Draw(problem.dtype, rng, device)
    q = draw(problem.tokens_q, problem.heads, problem.head_dim, grad=True)
    k, v = (draw(problem.tokens_kv, problem.kv_heads, problem.head_dim, grad=True) for _ in range(2))
    dout = draw(*q.shape)
    lists = {"cu_seqlens_q": torch.from_numpy(cu).to(device), "cu_seqlens_q_padded": torch.from_numpy(start).to(device)}
    out = tp.attention(q, k, v, **lists, mask=problem.mask, window=problem.window, precision=problem.precision, kernel=kernel,
                       dq_accumulation=problem.dq_accumulation, deterministic=problem.deterministic, fallback=cfg.run.fallback)
    out.backward(dout)
    group = problem.heads // problem.kv_heads
    bounds = BOUNDS[problem.dtype]
    for n, (begin, length) in enumerate(zip(start[:-1], np.diff(cu), strict=True)):
        if length == 0:
            continue
        rows = slice(begin, begin + length)
        got, want = {name: [] for name in ("out", "dq", "dk", "dv")}, {name: [] for name in ("out", "dq", "dk", "dv")}
        for kv_head in sorted({0, problem.kv_heads - 1}):
            heads, one = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
            inputs = [_f64(q[rows, heads]), _f64(k[rows, one]), _f64(v[rows, one])]
            lone = np.array([0, length])
            options = {"mask": problem.mask, "window": problem.window, "scale": problem.scale}
            reference, lse = oracle.attention_forward(*inputs, lone, **options)
            grads = oracle.attention_backward(_f64(dout[rows, heads]), *inputs, lone, **options)
            for name, mine, exact in zip(("out", "dq", "dk", "dv"),
                                         (out[rows, heads], q.grad[rows, heads], k.grad[rows, one], v.grad[rows, one]),
                                         (reference, *grads), strict=True):
                got[name].append(_f64(mine).ravel())
                want[name].append(np.asarray(exact).ravel())
        for name in got:
            bound = bounds["attention" if name == "out" else "gradient"]
            mine, exact = np.concatenate(got[name]), np.concatenate(want[name])
            yield _row(label, kernel, name, f"segment {n} [{length}]", mine, exact, bound)


def _linear(cfg, label, kernel, problem, rng, device) -> Iterator[Row]:
    import te_plugin.torch as tp

    precision, dtype = cfg.precision.name, run_dtype(cfg)
    rows = int(min(problem.m, max(128, PRODUCT_LIMIT // (2 * problem.n * problem.k) // 128 * 128)))
    draw = _Draw(dtype, rng, device)
    x, w, dy = draw(rows, problem.k, grad=True), draw(problem.n, problem.k, grad=True), draw(rows, problem.n)
    kind = numerics.scaling(precision)
    state = tp.LinearState(precision, device=device) if kind is not None and kind.delayed else None
    pow2 = cfg.precision.pow2_scale and state is None
    y = tp.linear(x, w, precision=precision, state=state, pow2_scale=pow2,
                  forward_accumulation=cfg.precision.forward_accumulation, fallback=cfg.run.fallback)
    y.backward(dy)
    # Delayed scaling starts from the first values, so its first step is current scaling.
    named = "fp8_current" if state is not None else precision
    named = "bf16" if named == "fp32" else named
    arrays = [_f64(t) for t in (x, w, dy)]
    bound = BOUNDS[dtype]["linear"]
    where = f"{rows} of {problem.m} rows" if rows < problem.m else f"{rows} rows"
    yield _row(label, kernel, "y", where, _f64(y), oracle.linear(arrays[0], arrays[1], None, named, pow2=pow2), bound)
    yield _row(label, kernel, "dx", where, _f64(x.grad), oracle.linear_dgrad(arrays[2], arrays[1], named, pow2=pow2), bound)
    yield _row(label, kernel, "dw", where, _f64(w.grad), oracle.linear_wgrad(arrays[2], arrays[0], named, pow2=pow2), bound)


def _experts(cfg, label, kernel, problem, rng, device) -> Iterator[Row]:
    import te_plugin.torch as tp

    draw = _Draw(problem.dtype, rng, device)
    x, w = draw(problem.m, problem.k, grad=True), draw(problem.groups, problem.n, problem.k, grad=True)
    dy = draw(problem.m, problem.n)
    sizes = rng.multinomial(problem.m, np.full(problem.groups, 1 / problem.groups))
    y = tp.grouped_linear(x, w, torch.from_numpy(sizes).to(device), precision=cfg.precision.name,
                          pow2_scale=cfg.precision.pow2_scale, fallback=cfg.run.fallback)
    y.backward(dy)
    named = "bf16" if cfg.precision.name == "fp32" else cfg.precision.name
    pow2 = cfg.precision.pow2_scale
    want = oracle.grouped_linear(_f64(x), _f64(w), sizes, named, pow2=pow2)
    want_dx, want_dw = oracle.grouped_linear_backward(_f64(dy), _f64(x), _f64(w), sizes, named, pow2=pow2)
    bound = BOUNDS[problem.dtype]["linear"]
    for output, got, exact in (("y", y, want), ("dx", x.grad, want_dx), ("dw", w.grad, want_dw)):
        yield _row(label, kernel, output, f"groups {sizes.tolist()}", _f64(got), exact, bound)


def _norm(cfg, label, kernel, problem, rng, device) -> Iterator[Row]:
    import te_plugin.torch as tp

    draw = _Draw(problem.dtype, rng, device)
    shape = problem.rows, problem.columns
    x, w, dy = draw(*shape, grad=True), draw(problem.columns, grad=True), draw(*shape)
    y = tp.rms_norm(x, w, problem.eps, kernel=kernel, fallback=cfg.run.fallback)
    y.backward(dy)
    dx, dw = oracle.rms_norm_backward(_f64(dy), _f64(x), _f64(w), problem.eps)
    for output, got, exact in (("y", y, oracle.rms_norm_forward(_f64(x), _f64(w), problem.eps)[0]), ("dx", x.grad, dx),
                               ("dw", w.grad, dw)):
        yield _row(label, kernel, output, f"{problem.rows} rows", _f64(got), exact, BOUNDS[problem.dtype]["pointwise"])


def _swiglu(cfg, label, kernel, problem, rng, device) -> Iterator[Row]:
    import te_plugin.torch as tp

    draw = _Draw(problem.dtype, rng, device)
    x, dy = draw(problem.rows, 2 * problem.columns, grad=True), draw(problem.rows, problem.columns)
    y = tp.swiglu(x, kernel=kernel, fallback=cfg.run.fallback)
    y.backward(dy)
    want, want_dx = oracle.swiglu_forward(_f64(x)), oracle.swiglu_backward(_f64(dy), _f64(x))
    for output, got, exact in (("y", y, want), ("dx", x.grad, want_dx)):
        yield _row(label, kernel, output, f"{problem.rows} rows", _f64(got), exact, BOUNDS[problem.dtype]["pointwise"])


def _rope(cfg, label, kernel, problem, rng, device) -> Iterator[Row]:
    import te_plugin.torch as tp

    draw = _Draw(problem.dtype, rng, device)
    x = draw(problem.tokens, problem.heads, problem.head_dim)
    positions = np.arange(problem.tokens) % cfg.data.seq_len
    inv_freq = oracle.rope_inv_freq(problem.head_dim, cfg.model.rope_theta).astype(np.float32)
    y = tp.rope(x, torch.from_numpy(positions).int().to(device), inv_freq=torch.from_numpy(inv_freq).to(device), kernel=kernel,
                fallback=cfg.run.fallback)
    # Angles are FP32 products: at position p they carry p rounding errors of 6e-8.
    bound = BOUNDS[problem.dtype]["pointwise"] + 1e-7 * cfg.data.seq_len
    yield _row(label, kernel, "y", f"{problem.tokens} rows", _f64(y), oracle.rope(_f64(x), positions, inv_freq), bound)


def _loss(cfg, label, kernel, problem, rng, device) -> Iterator[Row]:
    import te_plugin.torch as tp

    rows = min(problem.tokens, 1024)
    draw = _Draw(problem.dtype, rng, device)
    logits = draw(rows, problem.vocab, grad=True)
    labels = rng.integers(0, problem.vocab, rows)
    labels[::7] = -100
    loss = tp.cross_entropy(logits, torch.from_numpy(labels).to(device), kernel=kernel, fallback=cfg.run.fallback)
    weight = rng.standard_normal(rows)
    loss.backward(torch.from_numpy(weight).float().to(device))
    weight = weight.astype(np.float32).astype(np.float64)
    where, bounds = f"{rows} of {problem.tokens} rows", BOUNDS[problem.dtype]
    yield _row(label, kernel, "loss", where, _f64(loss), oracle.cross_entropy_forward(_f64(logits), labels)[0], 2e-6)
    yield _row(label, kernel, "dlogits", where, _f64(logits.grad), oracle.cross_entropy_backward(weight, _f64(logits), labels),
               bounds["pointwise"])


def _fused(cfg, label, kernel, problem, rng, device) -> Iterator[Row]:
    """The codes of an op that ends in a quantisation equal those of the op and the quantisation one after the other."""
    from te_plugin.ops.fused_checks import SEPARATE
    from te_plugin.torch.fused_quantize import dswiglu_quantize, fused_options, norm_quantize, swiglu_quantize
    from te_plugin.torch.quantize import QuantizeOptions

    cast = problem.cast
    draw, rows = _Draw(cast.dtype, rng, device), cast.rows
    scale = torch.full((1,), 20.0, device=device) if cast.delayed else None
    if problem.op == "norm_quantize":
        x, w = draw(rows, cast.columns), draw(cast.columns)
        run = lambda options: norm_quantize(x, w, options, scale)[0]
    elif problem.gradient:
        dy, x = draw(rows, problem.columns), draw(rows, 2 * problem.columns)
        run = lambda options: dswiglu_quantize(dy, x, options, scale)
    else:
        x = draw(rows, 2 * problem.columns)
        run = lambda options: swiglu_quantize(x, options, scale)
    alone = QuantizeOptions(cast.format, cast.granularity, cast.pow2_scale, cast.transpose, cast.delayed)
    got, want = (run(fused_options(alone, getattr(problem, "eps", 1e-5), name, cfg.run.fallback)) for name in (kernel, SEPARATE))
    for output in ("data", "data_t", "scale_inv"):
        codes = [getattr(made, output).float() for made in (got, want)]
        yield _row(label, kernel, output, f"{rows} rows", _f64(codes[0]), _f64(codes[1]), 0.0)


_POINTWISE = {"norm": _norm, "activation": _swiglu, "rope": _rope, "loss": _loss, "norm_quantize": _fused,
              "activation_quantize": _fused}
