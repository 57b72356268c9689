"""Dense and grouped GEMM against float64 products of the values that the FP8 codes and scales stand for."""

import threading

import numpy as np
import pytest

from te_plugin.numerics import E4M3, E5M2

from . import gpu, reference

torch = gpu.torch
pytestmark = pytest.mark.gpu

# FP8 products are exact and summed in FP32 every 128 values; inside, the tensor cores keep about 14 bits.
SUM_BOUND = 2e-3
BF16_BOUND = 4e-3
KINDS = {
    "tensor": (0, "tensor", "tensor"),
    "row": (1, "row", "row"),
    "block": (2, "block_1x128", "block_128x128"),
    "block_ab": (3, "block_1x128", "block_1x128"),
}
SHAPES = [
    (128, 256, 128),
    (256, 256, 512),
    (1, 128, 64),
    (100, 130, 160),
    (513, 384, 400),
    (300, 1000, 2064),
    (1000, 512, 1024),
]


def rough(rows, cols, seed):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((rows, cols))
        * np.exp(rng.standard_normal((rows, 1)))
        * np.exp(rng.standard_normal((1, cols)) * 0.5)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m,n,k", SHAPES)
def test_dense_fp8(kind, m, n, k):
    code, grain_a, grain_b = KINDS[kind]
    for fmt in (E4M3, E5M2) if code < 2 else (E4M3,):
        a, scale_a, a64 = gpu.quantized(rough(m, k, 1), grain_a, fmt)
        b, scale_b, b64 = gpu.quantized(rough(n, k, 2), grain_b, E4M3)
        want = a64 @ b64.T
        for dtype, accumulate in ((torch.bfloat16, 0), (torch.float32, 0), (torch.float32, 1)):
            c = gpu.poisoned((m, n), dtype) if not accumulate else torch.full((m, n), 0.5, device="cuda")
            gpu.call("gemm_fp8", a, b, scale_a, scale_b, c, fmt.code, E4M3.code, code, accumulate)
            limit = BF16_BOUND if dtype == torch.bfloat16 else SUM_BOUND
            assert reference.relative_error(c.double().cpu(), want + 0.5 * accumulate) < limit, (
                fmt.name,
                dtype,
                accumulate,
            )


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_with_several_tiles(kind):
    """More tiles than blocks: a tile's last part is written while the products of the next one run."""
    code, grain_a, grain_b = KINDS[kind]
    m, n, k = 4500, 2568, 1168
    a, scale_a, a64 = gpu.quantized(rough(m, k, 1), grain_a)
    b, scale_b, b64 = gpu.quantized(rough(n, k, 2), grain_b)
    want = a64 @ b64.T
    for tile_rows in (128, 256):
        c = gpu.poisoned((m, n), torch.bfloat16)
        gpu.call("gemm_fp8_tile", a, b, scale_a, scale_b, c, E4M3.code, E4M3.code, code, 0, tile_rows)
        assert reference.relative_error(c.double().cpu(), want) < BF16_BOUND


@pytest.mark.parametrize("m,n,k", SHAPES + [(40, 64, 72)])
def test_dense_bf16(m, n, k):
    a, b = gpu.cuda(rough(m, k, 3)).bfloat16(), gpu.cuda(rough(n, k, 4)).bfloat16()
    want = a.double().cpu().numpy() @ b.double().cpu().numpy().T
    for dtype in (torch.bfloat16, torch.float32):
        c = gpu.poisoned((m, n), dtype)
        gpu.call("gemm_bf16", a, b, c, 0)
        assert reference.relative_error(c.double().cpu(), want) < (BF16_BOUND if dtype == torch.bfloat16 else 1e-5)


def test_long_sums_do_not_drift():
    """All products positive: a sum kept in 14 bits over K = 16384 would lose digits that FP32 sums keep."""
    rng = np.random.default_rng(5)
    a, scale_a, a64 = gpu.quantized(rng.uniform(0.5, 1, (256, 16384)), "tensor")
    b, scale_b, b64 = gpu.quantized(rng.uniform(0.5, 1, (256, 16384)), "tensor")
    c = gpu.poisoned((256, 256), torch.float32)
    gpu.call("gemm_fp8", a, b, scale_a, scale_b, c, 0, 0, 0, 0)
    assert reference.relative_error(c.double().cpu(), a64 @ b64.T) < 5e-4


SPLITS = [[100, 0, 300, 7], [0, 0, 512, 0], [512], [1] * 40, [128, 256, 128], [37, 0, 0, 61], [0, 0, 0]]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("kind", ["bf16", "tensor", "row", "block"])
def test_grouped_rows(kind, sizes, dtype):
    groups, n, k, surplus = len(sizes), 136, 192, 21
    m = sum(sizes) + surplus
    x, w = rough(m, k, 6), rough(groups * n, k, 7)
    device_sizes = gpu.cuda(np.array(sizes, dtype))
    starts = np.cumsum([0, *sizes])
    if kind == "bf16":
        a, b = gpu.cuda(x).bfloat16(), gpu.cuda(w).bfloat16().view(groups, n, k)
        a64, b64 = a.double().cpu().numpy(), b.double().cpu().numpy()
    else:
        code, grain_a, grain_b = KINDS[kind]
        a, scale_a, a64 = gpu.quantized(x, grain_a)
        parts = [gpu.quantized(w[e * n : (e + 1) * n], grain_b) for e in range(groups)]
        b, b64 = torch.stack([p[0] for p in parts]), np.stack([p[2] for p in parts])
        scale_b = torch.stack([p[1] for p in parts]).contiguous()
        if kind == "tensor":
            scale_b = scale_b.view(groups)
    want = np.zeros((m, n))
    for e in range(groups):
        want[starts[e] : starts[e + 1]] = a64[starts[e] : starts[e + 1]] @ b64[e].T
    for out in (torch.bfloat16, torch.float32):
        c = gpu.poisoned((m, n), out)
        if kind == "bf16":
            a[starts[-1] :] = float("nan")  # surplus rows never matter
            gpu.call("grouped_gemm", a, b, device_sizes, c)
        else:
            a[starts[-1] :] = 0x7F
            gpu.call("grouped_gemm_fp8", a, b, scale_a, scale_b, device_sizes, c, 0, 0, code)
        assert reference.relative_error(c.double().cpu(), want) < (BF16_BOUND if out == torch.bfloat16 else SUM_BOUND)
        assert not c[starts[-1] :].any()


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("n,k", [(192, 136), (72, 520), (1048, 264)])
def test_grouped_dgrad_takes_the_weight_of_the_forward(n, k, sizes):
    """n is not always a multiple of what a stage holds: the next group's weight, NaN here for empty groups, must stay out."""
    groups, m = len(sizes), sum(sizes) + 21
    starts = np.cumsum([0, *sizes])
    dy, w = gpu.cuda(rough(m, n, 6)).bfloat16(), gpu.cuda(rough(groups * n, k, 7)).bfloat16().view(groups, n, k)
    dy64, w64 = dy.double().cpu().numpy(), w.double().cpu().numpy()
    want = np.zeros((m, k))
    for e in range(groups):
        want[starts[e] : starts[e + 1]] = dy64[starts[e] : starts[e + 1]] @ w64[e]
    dy[starts[-1] :] = float("nan")
    for e in range(groups):
        if sizes[e] == 0:
            w[e] = float("nan")
    dx = gpu.poisoned((m, k), torch.bfloat16)
    gpu.call("grouped_gemm_dgrad", dy, w, gpu.cuda(np.array(sizes, np.int32)), dx)
    assert reference.relative_error(dx.double().cpu(), want) < BF16_BOUND
    assert not dx[starts[-1] :].any()


WGRAD_SPLITS = SPLITS + [[128, 0, 384], [5, 300, 1000, 0, 30]]


@pytest.mark.parametrize(
    "n,k,sizes",
    [(136, 264, s) for s in [*WGRAD_SPLITS, [3] * 150]] + [(1104, 1544, s) for s in WGRAD_SPLITS if len(s) < 10],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bf16", "tensor", "row", "block_ab"])
def test_grouped_wgrad(kind, n, k, sizes):
    groups = len(sizes)
    m = -(-(sum(sizes) + 9) // 16) * 16
    dy, x = rough(m, n, 8), rough(m, k, 9)
    starts = np.cumsum([0, *sizes])
    device_sizes = gpu.cuda(np.array(sizes, np.int32))
    if kind == "bf16":
        a, b = gpu.cuda(dy).bfloat16(), gpu.cuda(x).bfloat16()
        a64, b64 = a.double().cpu().numpy().T, b.double().cpu().numpy().T
        a[starts[-1] :] = float("nan")
    else:
        code, grain, _ = KINDS[kind]
        a, scale_a, a64 = gpu.quantized(dy.T, grain, E4M3)
        b, scale_b, b64 = gpu.quantized(x.T, grain)
        a[:, starts[-1] :] = 0x7F
        b[:, starts[-1] :] = 0x7F
    want = np.stack([a64[:, starts[e] : starts[e + 1]] @ b64[:, starts[e] : starts[e + 1]].T for e in range(groups)])
    for accumulate in (0, 1):
        dw = (
            gpu.poisoned((groups, n, k), torch.float32)
            if not accumulate
            else torch.full((groups, n, k), 2.0, device="cuda")
        )
        if kind == "bf16":
            gpu.call("grouped_gemm_wgrad", a, b, device_sizes, dw, accumulate)
        else:
            gpu.call("grouped_gemm_fp8_wgrad", a, b, scale_a, scale_b, device_sizes, dw, 0, 0, code, accumulate)
        got = dw.double().cpu().numpy()
        for e in range(groups):
            if sizes[e] == 0:
                assert (got[e] == 2.0 * accumulate).all()
        assert reference.relative_error(got, want + 2.0 * accumulate) < SUM_BOUND


def random_operand(kind, rows, cols, generator):
    """Finite FP8 codes with scales of their kind, for results that are compared bit by bit.

    "weight": scales of 128x128 blocks. "bf16": values and no scale.
    """
    if kind == "bf16":
        return (torch.randn(rows, cols, generator=generator, device="cuda").bfloat16(),)
    codes = torch.randint(0, 0x70, (rows, cols), generator=generator, device="cuda", dtype=torch.uint8)
    codes += 0x80 * torch.randint(0, 2, (rows, cols), generator=generator, device="cuda", dtype=torch.uint8)
    shape = reference.scale_shape("block_128x128" if kind == "weight" else KINDS[kind][1], rows, cols)
    return codes, torch.rand(shape, generator=generator, device="cuda") + 0.5


def laid_by_block(scale):
    """The same 1x128 scales [lines, blocks], block after block in memory."""
    return scale.t().contiguous().t()


@pytest.mark.parametrize("m,n,k", [(300, 256, 512), (130, 272, 1168), (257, 136, 64), (128, 128, 640)])
@pytest.mark.parametrize("kind", ["block", "block_ab"])
def test_the_place_of_1x128_scales_changes_no_bit(kind, m, n, k):
    code, (generator, results) = KINDS[kind][0], (torch.Generator("cuda").manual_seed(1), [])
    a, scale_a = random_operand("block_ab", m, k, generator)
    b, scale_b = random_operand(kind if kind == "block_ab" else "weight", n, k, generator)
    sizes = torch.tensor([37, 0, 60], dtype=torch.int32, device="cuda")
    as_it_is = lambda scale: scale  # noqa: E731
    for lay in (as_it_is, laid_by_block):
        lay_b = lay if kind == "block_ab" else as_it_is
        c = gpu.poisoned((m, n), torch.float32)
        gpu.call("gemm_fp8", a, b, lay(scale_a), lay_b(scale_b), c, 0, 0, code, 0)
        results.append([c])
        if kind == "block":
            c = gpu.poisoned((m, n), torch.float32)
            weights, scales = b.expand(3, n, k).contiguous(), scale_b.expand(3, *scale_b.shape).contiguous()
            gpu.call("grouped_gemm_fp8", a, weights, lay(scale_a), scales, sizes, c, 0, 0, code)
        else:
            c = gpu.poisoned((3, m, n), torch.float32)
            gpu.call("grouped_gemm_fp8_wgrad", a, b, lay(scale_a), lay_b(scale_b), sizes, c, 0, 0, code, 0)
        results[-1].append(c)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def assert_same_bits_wherever_c_starts(call, start):
    """call(c, accumulate), twice with a c that is written in pieces of 16 bytes, and once with one that starts off them."""
    off = torch.empty(start.numel() + 1, device="cuda")[1:].view(start.shape)
    for accumulate in (0, 1):
        results = [start.clone(), start.clone(), off.copy_(start)]
        for c in results:
            call(c, accumulate)
        assert torch.isfinite(results[0]).all()
        first, *others = (c.view(torch.int32) for c in results)
        assert all(torch.equal(first, other) for other in others), f"accumulate {accumulate}"


# m, n: part of a tile; tails of rows and columns; more tiles than blocks; rows that are not multiples of 16 bytes.
RESULTS = [(40, 24), (257, 516), (2568, 1144), (130, 131)]


@pytest.mark.parametrize("sizes", [[100, 0, 300, 7], [0, 640, 1, 127, 128, 33, 900, 0], [3] * 150], ids=str)
@pytest.mark.parametrize("m,n", RESULTS)
@pytest.mark.parametrize("kind", ["bf16", "tensor", "row", "block_ab"])
def test_grouped_wgrad_gets_the_same_bits_wherever_c_starts(kind, m, n, sizes):
    if kind == "bf16":
        m, n = m // 8 * 8, n // 8 * 8  # rows of its operands are multiples of 16 bytes
    tokens = -(-(sum(sizes) + 9) // 16) * 16
    generator = torch.Generator("cuda").manual_seed(1)
    start = torch.randn(len(sizes), m, n, generator=generator, device="cuda")
    device_sizes = torch.tensor(sizes, device="cuda")
    shapes = [(tokens, m), (tokens, n)] if kind == "bf16" else [(m, tokens), (n, tokens)]
    (a, *scale_a), (b, *scale_b) = (random_operand(kind, *shape, generator) for shape in shapes)

    def call(c, accumulate):
        if kind == "bf16":
            gpu.call("grouped_gemm_wgrad", a, b, device_sizes, c, accumulate)
        else:
            gpu.call("grouped_gemm_fp8_wgrad", a, b, *scale_a, *scale_b, device_sizes, c, 0, 0, KINDS[kind][0], accumulate)

    assert_same_bits_wherever_c_starts(call, start)


@pytest.mark.parametrize("m,n", [*RESULTS, (4500, 1144)])  # the last: 256-row tiles
@pytest.mark.parametrize("kind", ["bf16", "tensor", "row", "block_ab"])
def test_dense_fp32_gets_the_same_bits_wherever_c_starts(kind, m, n):
    generator = torch.Generator("cuda").manual_seed(1)
    start = torch.randn(m, n, generator=generator, device="cuda")
    (a, *scale_a), (b, *scale_b) = (random_operand(kind, rows, 400, generator) for rows in (m, n))

    def call(c, accumulate):
        if kind == "bf16":
            gpu.call("gemm_bf16", a, b, c, accumulate)
        else:
            gpu.call("gemm_fp8", a, b, *scale_a, *scale_b, c, 0, 0, KINDS[kind][0], accumulate)

    assert_same_bits_wherever_c_starts(call, start)


def test_wrong_group_sizes_stay_inside_the_tensors():
    """Sizes are device data and cannot raise; too large or negative ones are cut, nothing is written outside."""
    a, b = torch.randn(64, 64, device="cuda").bfloat16(), torch.randn(3, 128, 64, device="cuda").bfloat16()
    for sizes in ([50, 50, 50], [-5, 64, 0], [2**31 - 1, 2**31 - 1, 1]):
        c = gpu.poisoned((64, 128), torch.bfloat16)
        gpu.call("grouped_gemm", a, b, torch.tensor(sizes, device="cuda"), c)
        assert torch.isfinite(c).all()


def test_a_thread_whose_first_call_this_is():
    """Autograd's thread may get here before any other call has given it a context; the driver's own functions need one."""
    a, scale_a, _ = gpu.quantized(rough(300, 256, 10), "tensor")
    b, scale_b, _ = gpu.quantized(rough(256, 256, 11), "tensor")
    results = [gpu.poisoned((300, 256), torch.bfloat16) for _ in range(2)]
    arguments = lambda c: ("gemm_fp8", a, b, scale_a, scale_b, c, 0, 0, 0, 0)  # noqa: E731
    gpu.call(*arguments(results[0]))
    failures = []

    def first_call():
        try:
            gpu.call(*arguments(results[1]))
        except Exception as error:  # a thread's exception reaches nobody by itself
            failures.append(error)

    thread = threading.Thread(target=first_call)
    thread.start()
    thread.join()
    assert not failures, failures
    assert torch.equal(*results)


def test_gemm_replays_in_a_cuda_graph():
    a, scale_a, _ = gpu.quantized(rough(300, 256, 10), "block_1x128")
    b, scale_b, _ = gpu.quantized(rough(256, 256, 11), "block_128x128")
    c = gpu.poisoned((300, 256), torch.bfloat16)
    gpu.call("gemm_fp8", a, b, scale_a, scale_b, c, 0, 0, 2, 0)
    want, graph = c.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.call("gemm_fp8", a, b, scale_a, scale_b, c, 0, 0, 2, 0)
    c.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(c, want)


def test_bad_calls_raise_before_any_launch():
    a, b = (
        torch.zeros(64, 128, dtype=torch.uint8, device="cuda"),
        torch.zeros(32, 128, dtype=torch.uint8, device="cuda"),
    )
    s, c = torch.ones(1, device="cuda"), gpu.poisoned((64, 32), torch.bfloat16)
    for args, word in (
        ((a, b, s, s, c, 0, 0, 0, 1), "accumulat"),
        ((a, b, s, s, c, 0, 1, 0, 0), "formats"),
        ((a, b, s, s, c, 0, 0, 1, 0), "scale_a"),
        ((a[:, :120].contiguous(), b[:, :120].contiguous(), s, s, c, 0, 0, 0, 0), "multiple of 16"),
        ((a, b, s, s, c[:60], 0, 0, 0, 0), "c must have shape"),
        ((a, b.cpu(), s, s, c, 0, 0, 0, 0), "device"),
    ):
        with pytest.raises(ValueError, match=word):
            gpu.call("gemm_fp8", *args)
    torch.cuda.synchronize()
