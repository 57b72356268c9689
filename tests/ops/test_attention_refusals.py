"""What attention cannot do is an error before anything is read: it says what was asked, why not, and what to change."""

import pytest
import torch

from te_plugin.plan import PlanError
from te_plugin.torch import attention

KERNELS = ["cpu", "composite"]


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(cu=(0, 4, 8), rows=8, kernel="cpu", heads=2, kv_heads=1, dim=16, **options):
    q, k = torch.zeros(rows, heads, dim), torch.zeros(rows, kv_heads, dim)
    return attention(q, k, k, cu_seqlens_q=cu if isinstance(cu, torch.Tensor) else ints(list(cu)), kernel=kernel, **options)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cu", [(0, 4, 9), (0, 6, 4), (0, -1, 8), (1, 4, 8), (0, 2**30, 2**30), (0, 4, -2147483648)])
def test_lists_that_leave_the_tensor_or_decrease(kernel, cu):
    with pytest.raises(ValueError, match="cu_"):
        run(cu, kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("padded", [(0, 5, 8), (-1, 4, 8), (0, 2**31 - 2, 8)])
def test_starts_that_leave_the_tensor(kernel, padded):
    with pytest.raises(ValueError, match="start|cu_"):
        run(kernel=kernel, cu_seqlens_q_padded=ints(list(padded)), cu_seqlens_kv_padded=ints(list(padded)))


@pytest.mark.parametrize(
    "options,text",
    [
        (dict(cu=torch.tensor([0, 4, 8])), "int32"),
        (dict(cu=torch.zeros(1, 3, dtype=torch.int32)), "one dimension"),
        (dict(cu=ints([])), "empty"),
        (dict(cu_seqlens_kv=ints([0, 8])), "2 entries, cu_seqlens_q has 3"),
        (dict(cu=(0, 4, 9)), "cu_seqlens_q ends with 9 but q has 8 rows"),
        (dict(mask=True), "mask=True must be a name"),
        (dict(mask="diagonal"), "none, causal, causal_top_left, causal_bottom_right"),
        (dict(heads=3, kv_heads=2), "heads=3 is not a multiple of kv_heads=2"),
        (dict(window=(-2, 0)), "below -1"),
        (dict(softmax_scale=0.0), "must be positive"),
        (dict(dq_accumulation="fp16"), "'fp16' is not one of fp32, bf16"),
        (dict(precision="fp4"), "'fp4' is not one of"),
        (dict(kernel="turbo"), "no kernel is named .turbo.; known kernels: "),
    ],
)
def test_wrong_arguments_are_named(options, text):
    with pytest.raises(ValueError, match=text):
        run(**options)


def test_a_kernel_that_cannot_is_refused_with_its_reason():
    with pytest.raises(PlanError, match="head_dim 264 is above 256"):
        run(dim=264)
    q = torch.zeros(8, 1, 192, requires_grad=True)
    with pytest.raises(PlanError, match="dq_accumulation=bf16 holds rows of 128, head_dim is 192; use fp32"):
        attention(q, q, q, cu_seqlens_q=ints([0, 8]), kernel="cpu", dq_accumulation="bf16")
    with pytest.raises(PlanError, match="composite.*keeps no dQ accumulator"):
        attention(q, q, q, cu_seqlens_q=ints([0, 8]), kernel="composite", dq_accumulation="bf16")


def test_dtypes_and_devices_must_agree():
    q, k = torch.zeros(8, 2, 16), torch.zeros(8, 1, 16)
    with pytest.raises(ValueError, match="one dtype"):
        attention(q, k.bfloat16(), k, cu_seqlens_q=ints([0, 8]))
    with pytest.raises(ValueError, match="one device"):
        attention(q, k.to("meta"), k, cu_seqlens_q=ints([0, 8]))
    with pytest.raises(ValueError, match="on meta, the other tensors on cpu"):
        attention(q, k, k, cu_seqlens_q=ints([0, 8]).to("meta"))
    with pytest.raises(ValueError, match=r"q\[Tq,H,D\]"):
        attention(q[0], k, k, cu_seqlens_q=ints([0, 8]))


@pytest.mark.report("huggingface/transformers#39408")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [4, (2.5, 0), (4,), (1, 2, 3), "ab", ("x", 0)], ids=str)
def test_a_window_says_both_sides_in_whole_keys(kernel, window):
    with pytest.raises(ValueError, match=r"\(W - 1, 0\)"):
        run(kernel=kernel, window=window)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_softmax_scale_is_positive_and_finite(kernel, scale):
    with pytest.raises(ValueError, match="positive and finite"):
        run(kernel=kernel, softmax_scale=scale)


@pytest.mark.parametrize("kernel", KERNELS)
def test_segments_that_overlap_are_refused_by_every_kernel(kernel):
    with pytest.raises(ValueError, match="overlap"):
        run(kernel=kernel, cu_seqlens_q_padded=ints([0, 2, 8]), cu_seqlens_kv_padded=ints([0, 2, 8]))


def test_a_list_in_place_of_a_tensor_is_named():
    with pytest.raises(ValueError, match="cu_seqlens_q must be an int32 tensor on cpu, got list"):
        attention(torch.zeros(8, 1, 16), torch.zeros(8, 1, 16), torch.zeros(8, 1, 16), cu_seqlens_q=[0, 8])
