"""Quantise a list of tensors together: all weights of a model in a few launches, the bytes of each quantised alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from te_plugin.ops.checks import check_flags
from te_plugin.ops.quantize.problem import check_format, check_granularity
from te_plugin.ops.quantize_many.problem import QuantizeManyProblem
from te_plugin.plan import plan, remember_unmeasured
from te_plugin.torch import launches
from te_plugin.torch.call import define, dtype_name, is_direct, launch, target_of
from te_plugin.torch.options import options as options_of
from te_plugin.torch.quantize import (
    QuantizedTensor,
    QuantizeOptions,
    allocated,
    as_op,
    as_tensor,
    outputs_of,
    quantize_operand,
    readable,
    specs_of,
)


@remember_unmeasured
def _prepared(shapes, dtype, device, key):
    """What a call needs besides its tensors: the plan, and shape and dtype of the copies of every tensor."""
    o = QuantizeOptions.from_key(key)
    matrices = [shape[-2:] for shape in shapes for _ in range(shape[0] if len(shape) == 3 else 1)]
    problem = QuantizeManyProblem.of(o.problem(*matrix, dtype) for matrix in matrices)
    return plan(problem, target_of(device), o.kernel, o.fallback), [specs_of(shape, o)[:4] for shape in shapes]


def quantize_operands(tensors: Sequence[torch.Tensor], o: QuantizeOptions,
                      scales: Sequence[torch.Tensor] | None = None) -> list[QuantizedTensor]:
    """What quantize_operand gives for each of them: matrices [R,C] or experts' weights [E,N,K], of one dtype and device.

    o.kernel: a kernel of quantize_many. scales: FP32[1] a tensor, with o.delayed only. The fast path: no checks, no autograd.
    """
    device = tensors[0].device
    chosen, specs = _prepared(tuple([tuple(x.shape) for x in tensors]), dtype_name(tensors[0]), device, o.key())
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        alone = dataclasses.replace(o, kernel="auto")
        return [quantize_operand(x, alone, scale) for x, scale in zip(tensors, scales or [None] * len(tensors), strict=True)]
    made, lists = [], tuple([] for _ in range(5))  # x, data, scale_inv, data_t, scale_inv_t of every matrix
    for x, copies in zip(tensors, specs, strict=True):
        experts = x.dim() == 3
        outputs = allocated(copies, device)
        made.append(outputs)
        for each, tensor in zip(lists, (x.contiguous() if experts else readable(x), *outputs), strict=True):
            if tensor is not None:
                each += _parts(tensor) if experts else [tensor]
    stats = torch.empty(len(lists[0]), 2, dtype=torch.float32, device=device)
    rows = stats.unbind(0)
    launch(chosen, "forward", lists[0], list(scales or ()), *lists[1:], rows, *chosen.attributes)
    return [as_tensor((*outputs, row), o.granularity, o.format, o.transpose)
            for outputs, row in zip(made, _of_weights(tensors, stats, rows), strict=True)]


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The parts of experts: matrices, or scales [1] of a tensor of scales [E]."""
    return tensor.split(1) if tensor.dim() == 1 else tensor.unbind(0)


def _of_weights(tensors, stats: torch.Tensor, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """stats[2] of every tensor from those of every matrix; experts' are joined, in a few launches for all weights."""
    found, first, experts = [], 0, {}
    for number, x in enumerate(tensors):
        size = x.shape[0] if x.dim() == 3 else 1
        if x.dim() == 3:
            experts.setdefault(size, []).append((number, first))
        found.append(rows[first])
        first += size
    for size, places in experts.items():
        each = torch.stack([stats[at:at + size] for _, at in places])
        joined = torch.stack([each[:, :, 0].amax(1), each[:, :, 1].sum(1)], 1)
        for (number, _), row in zip(places, joined.unbind(0), strict=True):
            found[number] = row
    return found


def _op(x: list[torch.Tensor], scales: list[torch.Tensor], options: str) -> list[torch.Tensor]:
    made = quantize_operands(x, QuantizeOptions.from_key(options), scales or None)
    return [t for one in made for t in as_op((one.data, one.scale_inv, one.data_t, one.scale_inv_t, one.stats))]


def _fake(x, scales, options: str) -> list[torch.Tensor]:
    o = QuantizeOptions.from_key(options)
    return [t for one in x for t in as_op(outputs_of(*one.shape, one.device, o))]


define("quantize_many(Tensor[] x, Tensor[] scales, str options) -> Tensor[]", _op, _fake)


def quantize_many(
    tensors: Sequence[torch.Tensor],
    dtype: str = "e4m3",
    granularity: str = "tensor",
    *,
    scales: Sequence[torch.Tensor] | None = None,
    pow2_scale: bool = False,
    transpose: bool = False,
    kernel: str = "auto",
    fallback: str = "error",
) -> list[QuantizedTensor]:
    """Quantise every x[R,C] of a list as `quantize` does, byte for byte, in a few launches whatever the length of the list.

    tensors: any shapes, one dtype (FP32, BF16 or FP16), one device; rows may be apart. dtype, granularity, pow2_scale,
    transpose: those of `quantize`, the same for all. scales: FP32[1] a tensor on its device, the given scales (granularity
    tensor only; not their inverses). Raises ValueError naming the tensor that does not fit.
    """
    tensors = [x.detach() for x in tensors]
    scales = None if scales is None else list(scales)
    check_format(dtype)
    check_granularity(granularity)
    check_flags(pow2_scale=pow2_scale, transpose=transpose)
    _check(tensors, scales, granularity, pow2_scale)
    o = options_of(QuantizeOptions, dtype, granularity, pow2_scale, transpose, scales is not None, kernel, fallback)
    if not tensors:
        return []
    if is_direct(tensors[0]):
        return quantize_operands(tensors, o, scales)
    outputs = torch.ops.te_plugin.quantize_many(tensors, scales or [], o.key())
    return [as_tensor(outputs[i:i + 5], granularity, dtype, transpose) for i in range(0, len(outputs), 5)]


def _check(tensors, scales, granularity: str, pow2_scale: bool) -> None:
    for number, x in enumerate(tensors):
        if x.dim() != 2:
            raise ValueError(f"quantize_many takes matrices [R,C]; tensor {number} has shape {tuple(x.shape)}: reshape it")
        for fact in ("dtype", "device"):
            got, want = getattr(x, fact), getattr(tensors[0], fact)
            if got != want:
                raise ValueError(f"quantize_many takes tensors of one {fact}: tensor {number} has {got}, tensor 0 has {want}; "
                                 f"call it once for each {fact}")
    if scales is None:
        return
    if pow2_scale or granularity != "tensor":
        raise ValueError(f"scales are given per tensor as they are; granularity is {granularity!r}, pow2_scale={pow2_scale}: "
                         f"leave scales out, or these")
    if len(scales) != len(tensors):
        raise ValueError(f"{len(scales)} scales for {len(tensors)} tensors; give one FP32[1] a tensor")
    for number, (scale, x) in enumerate(zip(scales, tensors, strict=True)):
        if (scale.dtype, tuple(scale.shape), scale.device) != (torch.float32, (1,), x.device):
            raise ValueError(f"scale {number} is {scale.dtype} {tuple(scale.shape)} on {scale.device}; FP32 (1,) on {x.device} "
                             f"is needed")
