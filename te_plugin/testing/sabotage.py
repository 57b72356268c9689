"""Attention whose backward writes dQ of every segment into slot 0: the incident this project began with, on request.

An allocator that hands a kernel the packed dQ accumulator while the kernel addresses it per segment has this effect: the rows
of the first segment hold the last segment's dQ, all other rows hold nothing. `install()` registers the kernel under its name,
last in the order; `remove()` takes it out again, or `auto` would take it for problems that every other kernel refuses.
"""

from __future__ import annotations

import torch

from te_plugin.ops.attention import kernels
from te_plugin.plan import Kernel, Plan, Supported, Target, Unsupported, plan, register, registered, unregister

NAME = "sabotage_dq_slot0"


def _forward(chosen: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    from te_plugin.torch.attention import run_forward

    return run_forward(_healthy(chosen), q, k, v, cu_q, cu_k, start_q, start_k)


def _backward(chosen: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
    from te_plugin.torch.attention import run_backward

    dq, dk, dv = run_backward(_healthy(chosen), dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k)
    broken = torch.zeros_like(dq)
    slot = int(start_q[0])
    for start, length in zip(start_q[:-1].tolist(), (cu_q[1:] - cu_q[:-1]).tolist(), strict=True):
        broken[slot:slot + length] = dq[start:start + length]
    return broken, dk, dv


def _healthy(chosen: Plan) -> Plan:
    return plan(chosen.problem, chosen.target)


def _supports(problem, target: Target) -> Supported | Unsupported:
    return Supported("deliberately broken, for tests of the checks")


def install() -> str:
    """Register the broken kernel (once) and return its name."""
    from te_plugin.torch import framework_attention

    if NAME not in {kernel.name for kernel in registered("attention")}:
        register(Kernel(name=NAME, op="attention", supports=_supports, attributes=kernels.attributes, composite=True))
        framework_attention.FORWARD[NAME] = _forward
        framework_attention.BACKWARD[NAME] = _backward
    return NAME


def remove() -> None:
    """Forget the broken kernel."""
    from te_plugin.torch import framework_attention

    unregister("attention", NAME)
    framework_attention.FORWARD.pop(NAME, None)
    framework_attention.BACKWARD.pop(NAME, None)
