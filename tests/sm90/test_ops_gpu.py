"""RMSNorm, SwiGLU, RoPE, cross-entropy against float64, and the fused quantising kernels against the op followed by quantize."""

import numpy as np
import pytest

from te_plugin import numerics
from te_plugin.numerics import E4M3, E5M2

from . import gpu, reference

torch = gpu.torch
pytestmark = pytest.mark.gpu
BOUND = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 2e-6}


def dtypes():
    return [torch.bfloat16, torch.float16, torch.float32] if torch else []


def bound(dtype):
    return BOUND[str(dtype).split(".")[1]]


def random(shape, dtype, seed, scale=1.0):
    t = (gpu.cuda(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)) * scale).to(dtype)
    return t, t.double().cpu().numpy()


def normal(shape, dtype, seed):
    """As random, made on the device: for large tensors."""
    return torch.randn(shape, dtype=torch.float32, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def norm64(x, w, eps):
    rstd = 1 / np.sqrt(np.mean(x * x, axis=1) + eps)
    return x * rstd[:, None] * w, rstd


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("rows,cols", [(5, 256), (3, 100), (300, 768), (7, 4096), (2, 8200), (600, 1000)])
def test_rms_norm(dtype, rows, cols):
    x, x64 = random((rows, cols), dtype, 1)
    w, w64 = random((cols,), dtype, 2)
    dy, dy64 = random((rows, cols), dtype, 3)
    y, rstd = gpu.poisoned((rows, cols), dtype), gpu.poisoned((rows,), torch.float32)
    gpu.call("rms_norm_forward", x, w, y, rstd, 1e-5)
    want, rstd64 = norm64(x64, w64, 1e-5)
    assert reference.relative_error(y.double().cpu(), want) < bound(dtype)
    assert reference.relative_error(rstd.cpu(), rstd64) < 1e-6
    dx, dw = gpu.poisoned((rows, cols), dtype), gpu.poisoned((cols,), torch.float32)
    gpu.call("rms_norm_backward", dy, x, w, rstd, dx, dw)
    hat = x64 * rstd64[:, None]
    g = dy64 * w64
    assert reference.relative_error(
        dx.double().cpu(), rstd64[:, None] * (g - hat * np.mean(g * hat, axis=1, keepdims=True))
    ) < bound(dtype)
    assert reference.relative_error(dw.cpu(), np.sum(dy64 * hat, axis=0)) < 1e-5
    again = gpu.poisoned((cols,), torch.float32)
    gpu.call("rms_norm_backward", dy, x, w, rstd, dx, again)
    assert torch.equal(dw, again)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("rows,cols", [(5, 256), (3, 100), (300, 768), (700, 4096), (2, 8200)])
def test_rms_norm_with_residual(dtype, rows, cols):
    x, residual, dy, dh = (random((rows, cols), dtype, seed)[0] for seed in range(1, 5))
    w, w64 = random((cols,), dtype, 5)
    y, h, plain_y, dx = (gpu.poisoned((rows, cols), dtype) for _ in range(4))
    rstd, plain_rstd = (gpu.poisoned((rows,), torch.float32) for _ in range(2))
    gpu.call("rms_norm_residual_forward", x, residual, w, y, h, rstd, 1e-5)
    gpu.call("rms_norm_forward", h, w, plain_y, plain_rstd, 1e-5)
    assert torch.equal(h, x + residual) and torch.equal(y, plain_y) and torch.equal(rstd, plain_rstd)
    dw, plain_dw = (gpu.poisoned((cols,), torch.float32) for _ in range(2))
    gpu.call("rms_norm_residual_backward", dy, dh, h, w, rstd, dx, dw)
    hat = h.double().cpu().numpy()
    rstd64 = norm64(hat, w64, 1e-5)[1][:, None]
    hat = hat * rstd64
    g = dy.double().cpu().numpy() * w64
    want = rstd64 * (g - hat * np.mean(g * hat, axis=1, keepdims=True)) + dh.double().cpu().numpy()
    assert reference.relative_error(dx.double().cpu(), want) < bound(dtype)
    gpu.call("rms_norm_backward", dy, h, w, rstd, dx, plain_dw)
    assert torch.equal(dw, plain_dw)


# Rows of a width that is taken through the ring of stages, many times around it; wide rows in few stages.
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("rows,cols", [(5000, 264), (3000, 4096), (900, 8192), (700, 16384)])
@pytest.mark.parametrize("offset", [8, 1], ids=["rows on 16 bytes", "rows off 16 bytes"])
def test_rms_norm_backward_of_rows_that_are_apart(dtype, rows, cols, offset):
    w, rstd = normal((cols,), dtype, 1), normal((rows,), torch.float32, 2).abs() + 0.5
    dy, dh, x = (normal((rows, cols), dtype, seed) for seed in range(3, 6))

    def backward(dy, x, dh=None):
        dx, dw = gpu.poisoned((rows, cols), dtype), gpu.poisoned((cols,), torch.float32)
        if dh is None:
            gpu.call("rms_norm_backward", dy, x, w, rstd, dx, dw)
        else:
            gpu.call("rms_norm_residual_backward", dy, dh, x, w, rstd, dx, dw)
        return dx, dw

    def apart(t):
        wide = gpu.poisoned((rows, cols + 16), dtype)
        wide[:, offset : offset + cols] = t
        return wide[:, offset : offset + cols]

    dx, dw = backward(dy, x)
    hat = x.double() * rstd.double()[:, None]
    g = dy.double() * w.double()
    want = rstd.double()[:, None] * (g - hat * (g * hat).mean(1, keepdim=True))
    assert ((dx.double() - want).norm() / want.norm()).item() < bound(dtype)
    want_dw = (dy.double() * hat).sum(0)
    assert ((dw.double() - want_dw).norm() / want_dw.norm()).item() < 1e-5
    for got, same in zip(backward(apart(dy), apart(x)), (dx, dw), strict=True):
        assert torch.equal(got, same)
    for got, same in zip(backward(apart(dy), apart(x), dh), backward(dy, x, dh), strict=True):
        assert torch.equal(got, same)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("rows,cols", [(4, 128), (33, 100), (130, 768)])
def test_swiglu(dtype, rows, cols):
    x, x64 = random((rows, 2 * cols), dtype, 4, 2.0)
    dy, dy64 = random((rows, cols), dtype, 5)
    y, dx = gpu.poisoned((rows, cols), dtype), gpu.poisoned((rows, 2 * cols), dtype)
    gpu.call("swiglu_forward", x, y)
    gate, up = x64[:, :cols], x64[:, cols:]
    s = 1 / (1 + np.exp(-gate))
    assert reference.relative_error(y.double().cpu(), gate * s * up) < bound(dtype)
    gpu.call("swiglu_backward", dy, x, dx)
    want = np.concatenate([dy64 * up * s * (1 + gate * (1 - s)), dy64 * gate * s], axis=1)
    assert reference.relative_error(dx.double().cpu(), want) < bound(dtype)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("tokens,heads,dim", [(37, 4, 128), (5, 3, 64), (9, 2, 20)])
def test_rope(dtype, tokens, heads, dim):
    x, x64 = random((tokens, heads + 1, dim), dtype, 6)
    x, x64 = x[:, :heads], x64[:, :heads]
    positions = np.random.default_rng(7).integers(0, 131072, tokens).astype(np.int32)
    inv_freq = (1 / 500000 ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
    y = gpu.poisoned((tokens, heads, dim), dtype)
    gpu.call("rope", x, gpu.cuda(positions), gpu.cuda(inv_freq), y, 0)
    angle = (positions[:, None].astype(np.float32) * inv_freq[None]).astype(np.float64)[:, None, :]
    a, b = x64[..., : dim // 2], x64[..., dim // 2 :]
    want = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)
    assert reference.relative_error(y.double().cpu(), want) < bound(dtype)
    back = gpu.poisoned((tokens, heads, dim), dtype)
    gpu.call("rope", y, gpu.cuda(positions), gpu.cuda(inv_freq), back, 1)
    assert reference.relative_error(back.double().cpu(), x64) < 2 * bound(dtype)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("tokens,vocabulary", [(7, 384), (40, 1001), (3, 128256)])
def test_cross_entropy(dtype, tokens, vocabulary):
    logits, l64 = random((tokens, vocabulary), dtype, 8, 3.0)
    rng = np.random.default_rng(9)
    labels = rng.integers(0, vocabulary, tokens).astype(np.int32)
    labels[1] = -100
    logits[1] = float("nan")
    l64[1] = 0
    dloss = rng.standard_normal(tokens).astype(np.float32)
    loss, lse = gpu.poisoned((tokens,), torch.float32), gpu.poisoned((tokens,), torch.float32)
    dlogits = gpu.poisoned((tokens, vocabulary), dtype)
    gpu.call("cross_entropy_forward", logits, gpu.cuda(labels), loss, lse)
    gpu.call("cross_entropy_backward", gpu.cuda(dloss), logits, gpu.cuda(labels), lse, dlogits)
    lse64 = np.log(np.sum(np.exp(l64 - l64.max(1, keepdims=True)), axis=1)) + l64.max(1)
    seen = labels != -100
    want = np.where(seen, lse64 - l64[np.arange(tokens), np.where(seen, labels, 0)], 0)
    assert reference.relative_error(loss.cpu(), want) < 1e-5 and loss[1] == 0
    grad = np.exp(l64 - lse64[:, None])
    grad[np.arange(tokens)[seen], labels[seen]] -= 1
    grad *= np.where(seen, dloss, 0)[:, None]
    assert reference.relative_error(dlogits.double().cpu(), grad) < bound(dtype) + 1e-5 and not dlogits[1].any()


def test_cross_entropy_of_a_label_outside_the_vocabulary_is_nan():
    logits, _ = random((2, 64), torch.bfloat16, 8)
    loss, lse = gpu.poisoned((2,), torch.float32).zero_(), gpu.poisoned((2,), torch.float32)
    gpu.call("cross_entropy_forward", logits, gpu.cuda(np.array([64, 3], np.int32)), loss, lse)
    assert torch.isnan(loss[0]) and torch.isfinite(loss[1])


FUSED = [
    ("tensor", E4M3, None),
    ("tensor", E5M2, None),
    ("tensor", E4M3, 3.0),
    ("row", E4M3, None),
    ("block_1x128", E4M3, None),
    ("block_128x128", E4M3, None),
    ("mx", E4M3, None),
]


def fused_outputs(rows, cols, granularity, transpose):
    out = [gpu.poisoned((rows, cols), torch.uint8), gpu.scale_buffer(granularity, rows, cols)]
    out += (
        [gpu.poisoned((cols, rows), torch.uint8), gpu.scale_buffer(granularity, cols, rows)]
        if transpose
        else [None, None]
    )
    return [*out, gpu.poisoned((2,), torch.float32)]


def check_fused(outputs, y, granularity, fmt, scale, transpose):
    """The fused outputs equal those of quantising the op's BF16 output y."""
    rows, cols = y.shape
    if scale is None:
        want = gpu.quantize(y, granularity, fmt, transpose=transpose)
    else:
        want = {"data": gpu.poisoned((rows, cols), torch.uint8)}
        data_t, inverse, stats = (
            gpu.poisoned((cols, rows), torch.uint8),
            gpu.poisoned((1,), torch.float32),
            gpu.poisoned((2,), torch.float32),
        )
        gpu.call("quantize_with_scale_transpose", y, scale, want["data"], data_t, inverse, stats, fmt.code)
        want = {
            k: v.cpu().numpy()
            for k, v in {**want, "scale_inv": inverse, "data_t": data_t, "scale_inv_t": inverse, "stats": stats}.items()
        }
    names = ["data", "scale_inv", "data_t", "scale_inv_t", "stats"]
    for name, got in zip(names, outputs, strict=True):
        if got is not None:
            np.testing.assert_array_equal(got.cpu().numpy(), want[name], err_msg=name)


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "rows+transposed"])
@pytest.mark.parametrize("granularity,fmt,scale", FUSED)
def test_fused_kernels_equal_the_op_followed_by_quantize(granularity, fmt, scale, transpose):
    given = None if scale is None else torch.tensor([scale], device="cuda")
    code = numerics.GRANULARITY_CODE[granularity]
    for rows, cols in ((130, 256), (64, 1024), (257, 384)):
        x, _ = random((rows, cols), torch.bfloat16, 10)
        residual, _ = random((rows, cols), torch.bfloat16, 11)
        for w in (random((cols,), torch.bfloat16, 12)[0], random((cols,), torch.float32, 13)[0]):
            for extra in (None, residual):
                h = None if extra is None else gpu.poisoned((rows, cols), torch.bfloat16)
                rstd, out = gpu.poisoned((rows,), torch.float32), fused_outputs(rows, cols, granularity, transpose)
                gpu.call("rms_norm_quantize", x, extra, w, h, rstd, given, *out[:4], out[4], 1e-5, code, fmt.code, 0)
                total = x if extra is None else x + extra
                if h is not None:
                    assert torch.equal(h, total)
                y, rstd2 = gpu.poisoned((rows, cols), torch.bfloat16), gpu.poisoned((rows,), torch.float32)
                gpu.call("rms_norm_forward", total, w, y, rstd2, 1e-5)
                assert torch.equal(rstd, rstd2)
                check_fused(out, y, granularity, fmt, given, transpose)
        pair, _ = random((rows, 2 * cols), torch.bfloat16, 14, 2.0)
        out, y = fused_outputs(rows, cols, granularity, transpose), gpu.poisoned((rows, cols), torch.bfloat16)
        gpu.call("swiglu_quantize", pair, given, *out, code, fmt.code, 0)
        gpu.call("swiglu_forward", pair, y)
        check_fused(out, y, granularity, fmt, given, transpose)
        out, dx = fused_outputs(rows, 2 * cols, granularity, transpose), gpu.poisoned((rows, 2 * cols), torch.bfloat16)
        gpu.call("dswiglu_quantize", x, pair, given, *out, code, fmt.code, 0)
        gpu.call("swiglu_backward", x, pair, dx)
        check_fused(out, dx, granularity, fmt, given, transpose)


@pytest.mark.parametrize("residual", [False, True], ids=["x", "x+residual"])
@pytest.mark.parametrize("rows,cols", [(5000, 264), (3000, 2056), (3000, 4096), (1500, 8192), (700, 16384)])
@pytest.mark.parametrize("special", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("granularity,fmt,scale", FUSED)
def test_rms_norm_quantize_of_many_rows(rows, cols, granularity, fmt, scale, residual, special):
    """Rows of x apart; more blocks than the GPU holds at once."""
    x, extra = (normal((rows, cols), torch.bfloat16, seed) for seed in (17, 18))
    w = normal((cols,), torch.bfloat16, 19)
    if special:
        x[3, 5], x[rows - 1, cols - 1] = float("nan"), float("inf")
    wide = gpu.poisoned((rows, cols + 8), torch.bfloat16)
    wide[:, 8:] = x
    h = gpu.poisoned((rows, cols), torch.bfloat16) if residual else None
    given = None if scale is None else torch.tensor([scale], device="cuda")
    rstd, out = gpu.poisoned((rows,), torch.float32), fused_outputs(rows, cols, granularity, True)
    code = numerics.GRANULARITY_CODE[granularity]
    gpu.call("rms_norm_quantize", wide[:, 8:], extra if residual else None, w, h, rstd, given, *out, 1e-5, code, fmt.code, 0)
    total = x + extra if residual else x
    y, rstd2 = gpu.poisoned((rows, cols), torch.bfloat16), gpu.poisoned((rows,), torch.float32)
    gpu.call("rms_norm_forward", total, w, y, rstd2, 1e-5)
    np.testing.assert_array_equal(rstd.cpu().numpy(), rstd2.cpu().numpy())
    if residual:
        np.testing.assert_array_equal(h.float().cpu().numpy(), total.float().cpu().numpy())
    check_fused(out, y, granularity, fmt, given, True)


@pytest.mark.parametrize("granularity,fmt,scale", FUSED)
def test_rms_norm_quantize_launches_one_kernel_where_scales_need_no_amax_first(granularity, fmt, scale):
    x, w = normal((300, 512), torch.bfloat16, 20), normal((512,), torch.bfloat16, 21)
    given = None if scale is None else torch.tensor([scale], device="cuda")
    rstd, out = gpu.poisoned((300,), torch.float32), fused_outputs(300, 512, granularity, True)
    code = numerics.GRANULARITY_CODE[granularity]
    args = (x, None, w, None, rstd, given, *out, 1e-5, code, fmt.code, 0)
    names = " ".join(gpu.kernels_of(lambda: gpu.call("rms_norm_quantize", *args)))
    one = granularity in ("block_1x128", "block_128x128", "mx") or scale is not None
    assert ("norm_cast_kernel" in names) == one and ("rows_kernel" in names) != one


def test_ops_replay_in_a_cuda_graph():
    x, _ = random((256, 512), torch.bfloat16, 15)
    w, _ = random((512,), torch.bfloat16, 16)
    y, rstd, dx, dw = (
        gpu.poisoned((256, 512), torch.bfloat16),
        gpu.poisoned((256,), torch.float32),
        gpu.poisoned((256, 512), torch.bfloat16),
        gpu.poisoned((512,), torch.float32),
    )
    out = fused_outputs(256, 512, "row", True)

    def step():
        gpu.call("rms_norm_forward", x, w, y, rstd, 1e-5)
        gpu.call("rms_norm_backward", y, x, w, rstd, dx, dw)
        gpu.call("quantize_transpose", y, *out, numerics.GRANULARITY_CODE["row"], 0, 0)

    step()
    want = [t.clone() for t in (y, dx, dw, *out)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for t in (y, dx, dw, *out):
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(want, (y, dx, dw, *out), strict=True))
