"""The segment lists as cuDNN reads them, and the rows outside segments, against loops over the lists."""

import numpy as np
import pytest

from . import gpu

pytestmark = pytest.mark.gpu
torch = gpu.torch

LISTS = {
    "packed": ([0, 3, 3, 10, 64], [0, 3, 3, 10, 64], 64),
    "gaps": ([0, 5, 5, 40], [2, 16, 16, 70], 80),
    "all empty": ([0, 0, 0], [0, 0, 0], 33),
    "one row": ([0, 1], [0, 1], 1),
    "many": (list(range(0, 3001, 3)), list(range(0, 5001, 5)), 5000),
}
INVALID = {
    "past the end": ([0, 30, 70], [0, 30, 70], 64),
    "negative length": ([0, 30, 20], [0, 30, 64], 64),
    "overlap": ([0, 30, 60], [0, 10, 64], 64),
    "not in order": ([0, 5, 5, 10], [0, 50, 20, 64], 64),
    "does not start at 0": ([1, 30, 64], [1, 30, 64], 64),
    "negative start": ([0, 30, 60], [-5, 30, 64], 64),
}


def int32(values):
    return gpu.cuda(np.array(values, dtype=np.int32))


def inside(cu, start, rows) -> np.ndarray:
    held = np.zeros(rows, dtype=bool)
    for n in range(len(cu) - 1):
        held[start[n] : start[n] + cu[n + 1] - cu[n]] = True
    return held


def offsets(cu, start, rows, q_strides=(7, 1), kv_strides=(2**33,), kv=None):
    kv_cu, kv_start, kv_rows = kv or (cu, start, rows)
    segments, strides = len(cu) - 1, len(q_strides) + len(kv_strides)
    outputs = (((2, segments), torch.int32), ((strides, segments + 1), torch.int64), ((1,), torch.int32))
    made = [torch.full(shape, -1, dtype=dtype, device="cuda") for shape, dtype in outputs]
    lists = [int32(values) for values in (cu, start, kv_cu, kv_start)]
    gpu.call("segment_offsets", *lists, rows, kv_rows, q_strides, kv_strides, 1, *made)
    return [t.cpu().numpy() for t in made]


@pytest.mark.parametrize("name", LISTS)
def test_lengths_and_offsets_are_those_of_the_lists(name):
    cu, start, rows = LISTS[name]
    lengths, found, valid = offsets(cu, start, rows)
    assert valid[0] == 1
    np.testing.assert_array_equal(lengths, np.stack([np.diff(cu)] * 2))
    np.testing.assert_array_equal(found, np.stack([np.array(start) * stride for stride in (7, 1, 2**33)]))


@pytest.mark.parametrize("name", INVALID)
def test_lists_that_are_not_valid_become_empty_segments_and_nan(name):
    cu, start, rows = INVALID[name]
    lengths, found, valid = offsets(cu, start, rows)
    assert valid[0] == 0 and not lengths.any() and not found.any()
    x = torch.ones(rows, 16, dtype=torch.bfloat16, device="cuda")
    gpu.call("fill_outside", x, int32(cu), int32(start), gpu.cuda(valid))
    assert torch.isnan(x).all()


def test_causal_segments_of_unequal_lengths_are_not_valid():
    *_, valid = offsets([0, 5, 10], [0, 5, 10], 10, kv=([0, 4, 10], [0, 4, 10], 10))
    assert valid[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LISTS)
def test_rows_outside_segments_become_zero_and_the_others_stay(name, dtype):
    cu, start, rows = LISTS[name]
    x = torch.randn(rows, 3, 8, device="cuda").to(dtype)
    want = torch.where(gpu.cuda(inside(cu, start, rows))[:, None, None], x, torch.zeros_like(x))
    gpu.call("fill_outside", x, int32(cu), int32(start), int32([1]))
    assert torch.equal(x, want)
