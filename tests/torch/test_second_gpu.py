"""A process that uses two GPUs: what a kernel is allowed (shared memory), scratch and cuDNN's handles belong to a device."""

import pytest
import torch

import te_plugin.torch as tp

pytestmark = [pytest.mark.multigpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]
ROWS, HIDDEN, FFN = 512, 256, 512


def trained(device: str, precision: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = tp.LayerNormMLP(HIDDEN, FFN, precision=precision, dtype=torch.bfloat16).to(device)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().to(device).requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(device))
    return [t.cpu() for t in (y, x.grad, *(p.grad for p in model.parameters()))]


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block"])
def test_the_second_gpu_gives_the_bits_of_the_first(precision):
    first, second = (trained(device, precision) for device in ("cuda:0", "cuda:1"))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_attention_runs_on_both():
    results = []
    for device in ("cuda:0", "cuda:1"):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(100, heads, 64, generator=generator).bfloat16().to(device) for heads in (4, 2, 2))
        cu = torch.tensor([0, 40, 100], dtype=torch.int32, device=device)
        results.append(tp.attention(q, k, v, cu_seqlens_q=cu).cpu())
    assert torch.equal(*results)
