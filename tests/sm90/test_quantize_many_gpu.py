"""quantize_many on Hopper: launches that do not grow with the list, refusals before any launch, CUDA graphs.

That every tensor has the bytes of quantize is tested in tests/ops/test_quantize_many.py.
"""

import pytest

from te_plugin import numerics

from . import gpu

torch = gpu.torch
pytestmark = pytest.mark.gpu

LAUNCHES = {"tensor": 3, "row": 4, "block_1x128": 2, "block_128x128": 2, "mx": 2}


def weights(count: int) -> list:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(256 + 64 * (i % 3), 136, generator=generator, device="cuda").bfloat16() for i in range(count)]


@pytest.mark.parametrize("granularity", LAUNCHES)
def test_launches_do_not_grow_with_the_list(granularity):
    from te_plugin.torch import quantize_many

    for count, tables in ((1, 1), (200, 1), (257, 2)):
        xs = weights(count)
        names = gpu.kernels_of(lambda xs=xs: quantize_many(xs, "e4m3", granularity, transpose=True, kernel="sm90"))
        assert len(names) == tables * LAUNCHES[granularity], names


@pytest.mark.parametrize("granularity", ["tensor", "block_128x128"])
def test_a_captured_call_replays_with_new_values(granularity):
    from te_plugin.torch import quantize, quantize_many

    xs = weights(20)
    run = lambda: quantize_many(xs, "e4m3", granularity, transpose=True, kernel="sm90")  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    for x in xs:
        x.mul_(-1.7)
    graph.replay()
    for got, x in zip(made, xs, strict=True):
        want = quantize(x, "e4m3", granularity, transpose=True)
        for name in ("data", "data_t", "scale_inv", "scale_inv_t", "stats"):
            assert torch.equal(getattr(got, name).view(torch.uint8), getattr(want, name).view(torch.uint8)), name


def test_bad_calls_raise_before_any_launch():
    xs = [torch.zeros(128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    data = [gpu.poisoned((128, 128), torch.uint8) for _ in xs]
    inverse = [gpu.poisoned((1,), torch.float32) for _ in xs]
    stats = list(gpu.poisoned((2, 2), torch.float32).unbind(0))
    good = [xs, [], data, inverse, [], [], stats, numerics.GRANULARITY_CODE["tensor"], 0, 0]
    for place, bad, word in (
        (0, [], "no tensor"),
        (0, [xs[0], xs[1].float()], "one dtype"),
        (0, [xs[0], xs[1].cpu()], "another device"),
        (0, [xs[0], xs[1][0]], "two dimensions"),
        (1, inverse[:1], "scale holds 1"),
        (2, [data[0], data[1][:64]], "data"),
        (4, data, "go together"),
        (6, stats[:1], "stats holds 1"),
        (7, 9, "granularity"),
        (8, 1, "e4m3"),
    ):
        with pytest.raises(ValueError, match=word):
            gpu.call("quantize_many", *good[:place], bad, *good[place + 1:])
    torch.cuda.synchronize()
    assert all((t == 0xA5).all() for t in data)
