"""qkv_rope, its gradient and qkv_rope_quantize as exported functions: poisoned outputs, odd memory, refusals, graphs, repetition.

That they give the bytes of the separate kernels is tests/ops/test_qkv_rope.py.
"""

import numpy as np
import pytest

from te_plugin import oracle

from . import gpu, reference

torch = gpu.torch
pytestmark = pytest.mark.gpu
LAYOUTS = {"split": 0, "grouped": 1}


def inputs(tokens, heads, kv_heads, dim, seed=0):
    """qkv as the right part of a wider matrix, in BF16; positions; frequencies."""
    rng = np.random.default_rng(seed)
    width = (heads + 2 * kv_heads) * dim
    wide = gpu.cuda(rng.standard_normal((tokens, width + 64)).astype(np.float32)).bfloat16()
    positions = gpu.cuda(rng.integers(0, 131072, tokens).astype(np.int32))
    return wide[:, 64:], positions, gpu.cuda(oracle.rope_inv_freq(dim))


def parts(tokens, heads, kv_heads, dim, dtype):
    return [gpu.poisoned((tokens, h, dim), dtype) for h in (heads, kv_heads, kv_heads)]


def quantised(tokens, heads, kv_heads, dim):
    return [*parts(tokens, heads, kv_heads, dim, torch.uint8), gpu.poisoned((kv_heads, dim, tokens), torch.uint8),
            gpu.poisoned((3,), torch.float32), gpu.poisoned((3, 2), torch.float32)]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(37, 8, 2, 128), (130, 3, 3, 64), (5, 40, 1, 256), (9, 2, 1, 20), (300, 1, 1, 16)], ids=str)
def test_against_float64(shape, layout):
    tokens, heads, kv_heads, dim = shape
    qkv, positions, inv_freq = inputs(*shape)
    made = parts(*shape, torch.bfloat16)
    gpu.call("qkv_rope", qkv, positions, inv_freq, *made, LAYOUTS[layout])
    where = positions.cpu().numpy(), inv_freq.cpu().numpy()
    want = oracle.qkv_rope(qkv.double().cpu().numpy(), *where, heads, kv_heads, layout)
    for got, exact in zip(made, want, strict=True):
        assert reference.relative_error(got.double().cpu(), exact) < 4e-3
    grads = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in made]  # heads first in memory
    dqkv = gpu.poisoned(qkv.shape, torch.bfloat16)
    gpu.call("qkv_rope_backward", *grads, positions, inv_freq, dqkv, LAYOUTS[layout])
    exact = oracle.qkv_rope_backward(*(t.double().cpu().numpy() for t in grads), *where, layout)
    assert reference.relative_error(dqkv.double().cpu(), exact) < 4e-3


def test_a_gradient_that_repeats_one_value():
    """What the gradient of a sum looks like: strides of 0 between rows and heads."""
    shape = (20, 4, 2, 64)
    _, positions, inv_freq = inputs(*shape)
    row = torch.randn(64, device="cuda").bfloat16()
    grads = [row.expand(20, h, 64) for h in (4, 2, 2)]
    got, want = (gpu.poisoned((20, 8 * 64), torch.bfloat16) for _ in range(2))
    gpu.call("qkv_rope_backward", *grads, positions, inv_freq, got, 0)
    gpu.call("qkv_rope_backward", *(g.contiguous() for g in grads), positions, inv_freq, want, 0)
    assert torch.equal(got, want)


@pytest.mark.parametrize("delayed", [False, True], ids=["current", "delayed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bytes_in_every_run_and_from_a_graph(layout, delayed):
    shape = (3001, 32, 8, 128)
    case = inputs(*shape)
    scale = gpu.cuda(np.array([50, 3, 0.5], np.float32)) if delayed else None
    outputs = [*quantised(*shape), *parts(*shape, torch.bfloat16), gpu.poisoned((3001, 48 * 128), torch.bfloat16)]

    def step():
        gpu.call("qkv_rope_quantize", *case, scale, *outputs[:6], LAYOUTS[layout], 0)
        gpu.call("qkv_rope", *case, *outputs[6:9], LAYOUTS[layout])
        gpu.call("qkv_rope_backward", *outputs[6:9], *case[1:], outputs[9], LAYOUTS[layout])

    step()
    want = [t.clone() for t in outputs]
    for _ in range(10):
        for t in outputs:
            t.view(torch.uint8).fill_(0xA5)
        step()
        assert all(torch.equal(a, b) for a, b in zip(want, outputs, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for t in outputs:
        t.view(torch.uint8).fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(want, outputs, strict=True))


def test_nothing_is_written_outside():
    """Outputs in the middle of larger memory: what lies around them stays."""
    shape, guard = (131, 6, 2, 64), 4096
    case = inputs(*shape)
    for make, names in ((quantised, "qkv_rope_quantize"), (lambda *s: parts(*s, torch.bfloat16), "qkv_rope")):
        outputs = make(*shape)
        memory = [torch.full((t.nbytes + 2 * guard,), 0x5A, dtype=torch.uint8, device="cuda") for t in outputs]
        inside = [m[guard:-guard].view(t.dtype).view(t.shape) for m, t in zip(memory, outputs, strict=True)]
        if names == "qkv_rope":
            gpu.call(names, *case, *inside, 1)
        else:
            gpu.call(names, *case, None, *inside, 1, 0)
        for m in memory:
            assert bool((m[:guard] == 0x5A).all()) and bool((m[-guard:] == 0x5A).all())


def test_no_tokens():
    outputs = quantised(0, 4, 2, 64)
    scale = gpu.cuda(np.array([2, 4, 8], np.float32))
    gpu.call("qkv_rope_quantize", *inputs(0, 4, 2, 64), scale, *outputs, 0, 0)
    assert outputs[4].tolist() == [0.5, 0.25, 0.125] and not outputs[5].any()
    gpu.call("qkv_rope_quantize", *inputs(0, 4, 2, 64), None, *outputs, 0, 0)
    assert outputs[4].tolist() == [1, 1, 1] and not outputs[5].any()


def test_refusals():
    qkv, positions, inv_freq = inputs(16, 4, 2, 64)
    made, codes = parts(16, 4, 2, 64, torch.bfloat16), quantised(16, 4, 2, 64)
    swapped = lambda t, a, b: t.transpose(a, b).contiguous().transpose(a, b)  # noqa: E731

    def refused(message, qkv=qkv, positions=positions, inv_freq=inv_freq, q=made[0], k=made[1], v=made[2], layout=0):
        with pytest.raises(ValueError, match=message):
            gpu.call("qkv_rope", qkv, positions, inv_freq, q, k, v, layout)

    refused("qkv must have shape", qkv=qkv[:, :-64])
    refused("layout 2 is unknown", layout=2)
    refused("positions must be int32", positions=positions.long())
    refused("positions must have shape", positions=positions[1:])
    refused("positions lies on another device", positions=positions.cpu())
    refused("inv_freq must have shape", inv_freq=inv_freq[1:])
    refused("k must have the dtype of the input", k=made[1].half())
    refused("v must be contiguous", v=swapped(made[2], 0, 1))
    refused("q has 3 heads, which is not a multiple of the 2 of k", q=made[0][:, :3])
    dqkv = gpu.poisoned(qkv.shape, qkv.dtype)
    with pytest.raises(ValueError, match="dq must have innermost stride 1"):
        gpu.call("qkv_rope_backward", swapped(made[0], 1, 2), *made[1:], positions, inv_freq, dqkv, 0)

    def cast_refused(message, case=(qkv, positions, inv_freq), scale=None, outputs=codes):
        with pytest.raises(ValueError, match=message):
            gpu.call("qkv_rope_quantize", *case, scale, *outputs, 0, 0)

    cast_refused("qkv must be bfloat16", case=(qkv.float(), positions, inv_freq))
    cast_refused("rows must start on 16 bytes", case=(inputs(16, 4, 2, 72)[0][:, 1:513], positions, inv_freq))
    cast_refused("head dim 40 must be a multiple of 16", case=inputs(16, 4, 2, 40), outputs=quantised(16, 4, 2, 40))
    cast_refused("q must be uint8 or float8_e4m3fn", outputs=[made[0], *codes[1:]])
    cast_refused("v_t must have shape", outputs=[*codes[:3], codes[2], *codes[4:]])
    cast_refused("scale must have shape", scale=inv_freq[:1])
