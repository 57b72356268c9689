"""Attention kernels that exist in torch only: framework maths (composite), the reference that is always there, torch's own
FlashAttention, and cuDNN's kernels (cudnn_attention.py).

Every function takes the plan and the same tensors as the compiled kernels; FORWARD and BACKWARD map a kernel's name to it.
"""

from __future__ import annotations

import torch

from te_plugin.plan import Plan
from te_plugin.torch import cudnn_attention
from te_plugin.torch.call import addressable


def segment_ids(cu: torch.Tensor, start: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(segment of each row or -1, position of each row in its segment), computed on the device without a host sync."""
    rows = torch.arange(tokens, device=cu.device, dtype=torch.int32)
    lengths = cu[1:] - cu[:-1]
    inside = (rows[:, None] >= start[None, :-1]) & (rows[:, None] < (start[:-1] + lengths)[None])
    if inside.shape[1] == 0:
        return torch.full_like(rows, -1), torch.zeros_like(rows)
    found = inside.any(dim=1)
    segment = torch.where(found, inside.int().argmax(dim=1).int(), -1)
    position = torch.where(found, rows - start[segment.clamp(min=0).long()], 0)
    return segment, position


def visible(plan: Plan, cu_q, cu_k, start_q, start_k, tokens_q: int, tokens_kv: int) -> torch.Tensor:
    """bool[Tq,Tk]: which keys a row sees."""
    problem = plan.problem
    seg_q, pos_q = segment_ids(cu_q, start_q, tokens_q)
    seg_k, pos_k = segment_ids(cu_k, start_k, tokens_kv)
    mask = (seg_q[:, None] == seg_k[None]) & (seg_q[:, None] >= 0)
    row = pos_q
    if problem.mask == "causal_bottom_right":
        shift = (cu_k[1:] - cu_k[:-1]) - (cu_q[1:] - cu_q[:-1])
        row = pos_q + torch.where(seg_q >= 0, shift[seg_q.clamp(min=0).long()], 0) if shift.numel() else pos_q
    return problem.visible(mask, pos_k[None] - row[:, None])


def _check_segments(plan: Plan, cu_q, cu_k, start_q, start_k, tokens_q, tokens_kv) -> None:
    """On the host where the lists are on the host; on a GPU the mask of `visible` keeps every access inside by itself."""
    if cu_q.is_cuda:
        return
    for name, cu, start, tokens in (("q", cu_q, start_q, tokens_q), ("kv", cu_k, start_k, tokens_kv)):
        lengths = (cu[1:] - cu[:-1]).tolist()
        if cu[0] != 0 or any(n < 0 for n in lengths):
            raise ValueError(f"cu_seqlens_{name} must start at 0 and not decrease: {cu.tolist()}")
        if any(n and (s < 0 or s + n > tokens) for s, n in zip(start[:-1].tolist(), lengths, strict=True)):
            raise ValueError(f"cu_seqlens_{name} reaches past the {tokens} rows of the tensor: {cu.tolist()}, "
                             f"starts {start.tolist()}")
        starts = start.tolist()
        if any(n and s + n > after for s, n, after in zip(starts, lengths, starts[1:], strict=False)):
            raise ValueError(f"cu_seqlens_{name}: segments overlap or are not in order: {cu.tolist()}, starts {starts}")
    if plan.problem.mask == "causal" and not torch.equal(cu_q, cu_k):
        raise ValueError("mask='causal' needs equal q and kv lengths per segment; say causal_top_left or causal_bottom_right")


def _scores(plan: Plan, q, k, mask):
    """Masked, scaled scores [H,Tq,Tk] in FP32; rows of q and k outside segments are replaced by 0 before any product."""
    group = plan.problem.heads // plan.problem.kv_heads
    q = torch.where(mask.any(1)[:, None, None], q, 0).float()
    k = torch.where(mask.any(0)[:, None, None], k, 0).float().repeat_interleave(group, 1)
    return torch.einsum("qhd,khd->hqk", q, k).mul(plan.problem.scale).masked_fill(~mask, float("-inf"))


def _composite_forward(plan: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    _check_segments(plan, cu_q, cu_k, start_q, start_k, q.shape[0], k.shape[0])
    mask = visible(plan, cu_q, cu_k, start_q, start_k, q.shape[0], k.shape[0])
    scores = _scores(plan, q, k, mask)
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    group = plan.problem.heads // plan.problem.kv_heads
    v = torch.where(mask.any(0)[:, None, None], v, 0).float().repeat_interleave(group, 1)
    return torch.einsum("hqk,khd->qhd", p, v).to(q.dtype), lse


def _composite_backward(plan: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
    problem = plan.problem
    mask = visible(plan, cu_q, cu_k, start_q, start_k, q.shape[0], k.shape[0])
    group = problem.heads // problem.kv_heads
    p = torch.exp(_scores(plan, q, k, mask) - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    rows, keys = mask.any(1)[:, None, None], mask.any(0)[:, None, None]
    q, dout, out = (torch.where(rows, x, 0).float() for x in (q, dout, out))
    k32, v32 = (torch.where(keys, x, 0).float().repeat_interleave(group, 1) for x in (k, v))
    dv = torch.einsum("hqk,qhd->khd", p, dout)
    dp = torch.einsum("qhd,khd->hqk", dout, v32)
    ds = p * (dp - (dout * out).sum(-1).T[..., None])
    dq = torch.einsum("hqk,khd->qhd", ds, k32) * problem.scale
    dk = torch.einsum("hqk,qhd->khd", ds, q) * problem.scale
    fold = lambda x: x.unflatten(1, (problem.kv_heads, group)).sum(2)  # noqa: E731
    return dq.to(k.dtype), fold(dk).to(k.dtype), fold(dv).to(v.dtype)


class _FlashSegments:
    """cu_seqlens as FlashAttention 2 wants them: one list that is both offsets and lengths, and the rows that count.

    Where segments may have gaps between them, a segment is stretched over the gap behind it. Under a causal mask its real rows
    never see those rows; their inputs are replaced by 0, so that NaN there meets no product. Without gaps the kernel reads
    nothing outside segments. Outputs of rows outside are 0 either way. Lists that reach outside the tensor are bent back inside
    before the kernel sees them, and the result is NaN, because reading them on the host would stop the GPU.
    """

    def __init__(self, cu: torch.Tensor, start: torch.Tensor, tokens: int, gaps: bool):
        lengths = cu[1:] - cu[:-1]
        self.cu = torch.cummax(start.clamp(0, tokens), 0).values.int()
        used = lengths > 0
        ordered = (start[:-1] >= 0) & (start[:-1] <= start[1:]) & (lengths >= 0)
        valid = (ordered & (~used | (start[:-1] + lengths <= start[1:]))).all() & (start[-1] <= tokens) & (cu[0] == 0)
        self.gaps = gaps
        self.inside = (segment_ids(cu, start, tokens)[0] >= 0)[:, None, None]
        self.kept = self.inside & valid
        self.outside_value = torch.where(valid, 0.0, float("nan"))

    def clean(self, x: torch.Tensor) -> torch.Tensor:
        # An empty tensor may have any strides; torch asks for 1.
        return torch.where(self.inside, x, 0) if self.gaps or not x.numel() else addressable(x)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.kept, x, self.outside_value.to(x.dtype))


def _window(plan: Plan) -> tuple[int | None, int | None]:
    left, _ = plan.problem.window
    return (left, 0) if left >= 0 else (None, None)


def _flash_segments(plan: Plan, q, k, cu_q, cu_k, start_q, start_k) -> tuple[_FlashSegments, _FlashSegments]:
    at_q = _FlashSegments(cu_q, start_q, q.shape[0], plan.problem.gaps)
    if cu_k is cu_q and start_k is start_q:
        return at_q, at_q
    return at_q, _FlashSegments(cu_k, start_k, k.shape[0], plan.problem.gaps)


def _flash_forward(plan: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    if plan.problem.segments == 0:  # torch asks for one
        return torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
    at_q, at_k = _flash_segments(plan, q, k, cu_q, cu_k, start_q, start_k)
    left, right = _window(plan)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        at_q.clean(q), at_k.clean(k), at_k.clean(v), at_q.cu, at_k.cu, q.shape[0], k.shape[0], 0.0, True, False,
        scale=plan.problem.scale, window_size_left=left, window_size_right=right)
    lse = torch.where(at_q.inside[:, 0, 0], lse, float("-inf"))
    return at_q.result(out), lse


def _flash_backward(plan: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
    if plan.problem.segments == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    at_q, at_k = _flash_segments(plan, q, k, cu_q, cu_k, start_q, start_k)
    left, right = _window(plan)
    empty = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = torch.where(torch.isinf(lse), 0, lse)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        at_q.clean(dout), at_q.clean(q), at_k.clean(k), at_k.clean(v), at_q.clean(out), lse, at_q.cu, at_k.cu, q.shape[0],
        k.shape[0], 0.0, True, empty, empty, scale=plan.problem.scale, window_size_left=left, window_size_right=right)
    return at_q.result(dq), at_k.result(dk), at_k.result(dv)


FORWARD = {"composite": _composite_forward, "flash": _flash_forward, "cudnn": cudnn_attention.forward}
BACKWARD = {"composite": _composite_backward, "flash": _flash_backward, "cudnn": cudnn_attention.backward}
