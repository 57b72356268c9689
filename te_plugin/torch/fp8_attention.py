"""FP8 attention for torch: operands are quantised per tensor, then the planned kernel multiplies them.

All operands are E4M3, dS with one scale a tile and P with a constant scale. K is not centred here, although that costs less
error: the log-sum-exp that the op returns would be that of the centred scores.
"""

from __future__ import annotations

import torch

from te_plugin import numerics
from te_plugin.ops.attention.problem import DQ_CODE
from te_plugin.plan import Plan
from te_plugin.torch.call import empty, launch, scratch

P_SCALE = 256.0  # P lies in [0, 1]; a power of two below E4M3's 448
FORMAT = numerics.E4M3


def _quantize(plan: Plan, x, cu, start):
    device = x.device
    data = empty(x.shape, torch.float8_e4m3fn, device)
    scale_inv, stats = empty((1,), torch.float32, device), empty((2,), torch.float32, device)
    launch(plan, "quantize", x, cu, start, data, scale_inv, stats, FORMAT.code, 0, 0)
    return data, scale_inv


def _operands(plan: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    made = [_quantize(plan, q, cu_q, start_q), _quantize(plan, k, cu_k, start_k), _quantize(plan, v, cu_k, start_k)]
    return [data for data, _ in made], [scale for _, scale in made]


def forward(plan: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    """out[Tq,H,D] in q's dtype, lse[H,Tq] of the quantised operands."""
    data, scales = _operands(plan, q, k, v, cu_q, cu_k, start_q, start_k)
    out, lse = empty(q.shape, q.dtype, q.device), empty((q.shape[1], q.shape[0]), torch.float32, q.device)
    launch(plan, "forward", *data, *scales, cu_q, cu_k, start_q, start_k, out, lse, *plan.attributes[:4], FORMAT.code, P_SCALE)
    return out, lse


def backward(plan: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
    """dq, dk, dv in the inputs' dtype. Operands are quantised again: keeping them would cost more memory than time."""
    data, scales = _operands(plan, q, k, v, cu_q, cu_k, start_q, start_k)
    dout8, dout_scale = _quantize(plan, dout, cu_q, start_q)
    grads = [empty(x.shape, x.dtype, x.device) for x in (q, k, v)]
    launch(plan, "backward", dout8, *data, dout_scale, *scales, out, lse, cu_q, cu_k, start_q, start_k, *grads,
           *scratch(plan, "backward", q.device), *plan.attributes[:4], DQ_CODE[plan.problem.dq_accumulation], FORMAT.code,
           FORMAT.code, P_SCALE, 0)
    return tuple(grads)
