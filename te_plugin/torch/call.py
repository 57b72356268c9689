"""The one call path from torch to a compiled kernel: it obeys a plan and decides nothing.

Scratch is allocated exactly as `plan.buffers` says; the exported function gets the tensors, then the plan's attributes.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd import forward_ad

from te_plugin import ffi
from te_plugin.plan import BufferSpec, Plan, PlanError, Target
from te_plugin.torch import launches

LIBRARY = torch.library.Library("te_plugin", "DEF")

DTYPE_NAME = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
TORCH_DTYPE = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "e4m3_fnuz": torch.float8_e4m3fnuz, "e5m2_fnuz": torch.float8_e5m2fnuz,
}


def define(schema: str, implementation, fake) -> None:
    """Register an op with one implementation for CPU and CUDA tensors and a fake one for tracing.

    Library.define is used rather than @custom_op because a call through it costs half as much.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"te_plugin::{name}", fake, lib=LIBRARY)


def is_direct(x: torch.Tensor) -> bool:
    """Whether an op on x would go straight to its implementation, so that this may be called without the dispatcher (4 us).

    Not while a graph is traced, under a dispatch mode (fake tensors, FLOP counters), in a transform of torch.func or with
    forward-mode derivatives (which an implementation called alone would drop), or for a subclass of Tensor.
    """
    return (type(x) is torch.Tensor and not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0
            and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0)


def first_derivative_only(backward):
    """For the backward of an autograd.Function whose kernels autograd cannot see into: NotImplementedError where they would drop
    second derivatives without a word (create_graph=True).

    Stricter than torch's once_differentiable, which lets a loss pass whose own gradient is a constant. A traced graph refuses by
    itself.
    """
    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{backward.__qualname__.split('.')[0].strip('_')}: create_graph=True asks for second derivatives, and there are "
                f"none through this op; leave create_graph out, or use torch's own function where they are needed")
        return backward(ctx, *grads)

    return checked


class _NoGraph:
    """Stands in for autograd's context where no graph is built: it keeps nothing."""

    def __init__(self, needs_input_grad: list[bool]):
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def apply(function: type[torch.autograd.Function], tensors: tuple[torch.Tensor | None, ...], *others):
    """function.apply(*tensors, *others); where no graph is to be built, its forward alone without autograd's bookkeeping (5 us).

    The arithmetic is the same, and forward sees the same needs_input_grad: without a graph these still say what is trained.
    """
    needs = [x is not None and x.requires_grad for x in tensors]
    if (True in needs and torch.is_grad_enabled()) or not is_direct(tensors[0]):
        return function.apply(*tensors, *others)
    return function.forward(_NoGraph(needs), *tensors, *others)


def version_of(tensor: torch.Tensor) -> int:
    """The counter of in-place changes; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Operands of a matrix product as torch.autocast wants them: in its dtype where it is on, else as they are."""
    if not isinstance(tensors[0], torch.Tensor):
        raise ValueError(f"a tensor is needed, got {type(tensors[0]).__name__}")
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    low = torch.get_autocast_dtype(device)
    return tuple([x if x is None or x.dtype not in _AUTOCAST_FROM else x.to(low) for x in tensors])


_AUTOCAST_FROM = (torch.float32, torch.bfloat16, torch.float16)


def dtype_name(tensor: torch.Tensor) -> str:
    name = DTYPE_NAME.get(tensor.dtype)
    if name is None:
        raise ValueError(f"dtype {tensor.dtype} is not one of {', '.join(map(str, DTYPE_NAME))}")
    return name


@functools.cache
def target_of(device: torch.device) -> Target:
    """The target of tensors on a device; PlanError for a device no kernel knows."""
    if device.type == "cpu":
        return Target("cpu", "torch", local=True)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if torch.version.hip:
            arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        else:
            arch = {9: "sm90", 10: "sm100"}.get(major, f"sm{major}{minor}")
        return Target(arch, "torch", local=True)
    raise PlanError(f"tensors are on {device}; kernels exist for cpu and cuda devices")


def empty(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.empty with the sizes as arguments of their own: torch takes twice as long to parse a tuple of them."""
    return torch.empty(*shape, dtype=dtype, device=device)


def addressable(x: torch.Tensor) -> torch.Tensor:
    """x where a kernel may read rows of its last dimension in pieces of 16 bytes, else a copy that allows it."""
    if x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    apart = (stride * x.element_size() % 16 for stride in x.stride()[:-1])
    return x if x.stride(-1) == 1 and not any(apart) else x.contiguous()


def allocate(spec: BufferSpec, device: torch.device) -> torch.Tensor:
    dtype = TORCH_DTYPE[spec.dtype]
    if spec.zeroed:
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    return torch.empty(spec.shape, dtype=dtype, device=device)


def scratch(plan: Plan, stage: str, device: torch.device) -> list[torch.Tensor]:
    return [allocate(spec, device) for spec in plan.buffers if spec.stage == stage]


def launch(plan: Plan, stage: str, *arguments) -> None:
    """Run one entry point of the planned kernel on tensors and scalars, on the current stream of their device."""
    kernel = plan.kernel
    launches.record(plan, stage)
    ffi.function(kernel.library, kernel.entry_points[stage])(*arguments)


def check_device(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, the tensor to work on is on {device}; move one of them")


def check_int32(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be an int32 tensor on {device}, got {type(tensor).__name__}")
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors on {device}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
