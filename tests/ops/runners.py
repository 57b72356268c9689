"""How a planned kernel is run on NumPy inputs: through the raw exported function, through torch, through JAX.

`implementations(op)` lists every (runner, registered kernel) of this machine, so a kernel is tested by being registered. A
runner takes and returns float64 arrays; rounding to the kernel's dtype is its first step. Outputs start as NaN: the raw runner
fills them itself, torch is asked to fill fresh memory with NaN.
"""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from te_plugin import ffi
from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.plan import Kernel, Plan, PlanError, Target, plan, registered

from .problems import AttentionCase

TORCH_DTYPE = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32, "uint8": torch.uint8,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3_fnuz": torch.float8_e4m3fnuz,
    "e5m2_fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip


@contextlib.contextmanager
def nan_filled_memory():
    """torch.empty gives NaN (floats) or the largest integer inside this block."""
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def attention_problem(case: AttentionCase, dtype: str, **options) -> AttentionProblem:
    window = tuple(-1 if side is None else side for side in (case.window or (None, None)))
    return AttentionProblem(
        tokens_q=case.q_rows, tokens_kv=case.k_rows, segments=case.segments, heads=case.heads, kv_heads=case.kv_heads,
        head_dim=case.head_dim, dtype=dtype, mask=case.mask, window=window, softmax_scale=case.scale, gaps=case.gaps, **options
    )  # fmt: skip


class RawRunner:
    """Calls the exported function itself, with the buffers and attributes of the plan; torch only carries the memory."""

    name, framework = "raw", None

    def __init__(self, arch: str, device: str):
        self.target, self.device = Target(arch, local=True), device

    def can_call(self, kernel: Kernel) -> bool:
        return kernel.library is not None

    def plan(self, problem, kernel: str) -> Plan:
        return plan(problem, self.target, kernel)

    def attention(self, case, inputs, dtype, kernel, backward=True, buffers=None, **options) -> dict[str, np.ndarray]:
        """buffers: BufferSpecs to allocate in place of the plan's own (to show that a wrong layout is caught)."""
        chosen = self.plan(attention_problem(case, dtype, needs_backward=backward, **options), kernel)
        q, k, v, dout = (self.tensor(inputs[name], dtype) for name in ("q", "k", "v", "dout"))
        segments = [self.tensor(x, "int32") for x in (case.cu_q, case.cu_k, case.start_q, case.start_k)]
        out, lse = self.nan(q.shape, dtype), self.nan((case.heads, case.q_rows), "fp32")
        self.call(chosen, "forward", [q, k, v, *segments, out, lse], chosen.attributes[:4])
        result = {"out": out, "lse": lse}
        if backward:
            grads = [self.nan(x.shape, dtype) for x in (q, k, v)]
            self.call(chosen, "backward", [dout, q, k, v, out, lse, *segments, *grads], chosen.attributes, buffers)
            result |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        return {name: numpy(x) for name, x in result.items()}

    def call(self, chosen: Plan, stage: str, tensors: list, attributes, buffers=None) -> None:
        for spec in chosen.buffers_of(stage) if buffers is None else buffers:
            zeros = torch.zeros(spec.shape, dtype=TORCH_DTYPE[spec.dtype], device=self.device)
            tensors = [*tensors, zeros if spec.zeroed else self.nan(spec.shape, spec.dtype)]
        ffi.function(chosen.kernel.library, chosen.kernel.entry_points[stage])(*tensors, *attributes)

    def tensor(self, x, dtype: str) -> torch.Tensor:
        return to_torch(x, dtype, self.device)

    def nan(self, shape, dtype: str) -> torch.Tensor:
        return nan_tensor(shape, dtype, self.device)


class TorchRunner:
    """te_plugin.torch's public functions with autograd."""

    name, framework = "torch", "torch"

    def __init__(self, arch: str, device: str):
        self.target, self.device = Target(arch, "torch", local=True), device

    def can_call(self, kernel: Kernel) -> bool:
        return True

    def plan(self, problem, kernel: str) -> Plan:
        return plan(problem, self.target, kernel, fallback="allow")

    def attention(self, case, inputs, dtype, kernel, backward=True, **options) -> dict[str, np.ndarray]:
        from te_plugin.torch.attention import attention

        q, k, v, dout = (to_torch(inputs[name], dtype, self.device) for name in ("q", "k", "v", "dout"))
        for x in (q, k, v):
            x.requires_grad_(backward)
        cu_q, cu_k, start_q, start_k = (
            to_torch(x, "int32", self.device) for x in (case.cu_q, case.cu_k, case.start_q, case.start_k)
        )
        keys = {} if case.self_attention else {"cu_seqlens_kv": cu_k}
        if case.gaps:
            keys |= {"cu_seqlens_q_padded": start_q}
            keys |= {} if case.self_attention else {"cu_seqlens_kv_padded": start_k}
        with nan_filled_memory():
            out, lse = attention(q, k, v, cu_seqlens_q=cu_q, mask=case.mask, window=case.window, softmax_scale=case.scale,
                                 kernel=kernel, fallback="allow", return_lse=True, **keys, **options)  # fmt: skip
            result = {"out": out, "lse": lse}
            if backward:
                out.backward(dout)
                result |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
        return {name: numpy(x) for name, x in result.items()}


class JaxRunner:
    """te_plugin.jax's public functions with jax.vjp."""

    name, framework = "jax", "jax"

    def __init__(self, arch: str, device: str):
        self.target, self.device = Target(arch, "jax", local=True), device

    def can_call(self, kernel: Kernel) -> bool:
        return True

    def plan(self, problem, kernel: str) -> Plan:
        return plan(problem, self.target, kernel, fallback="allow")

    def attention(self, case, inputs, dtype, kernel, backward=True, **options) -> dict[str, np.ndarray]:
        import jax
        import jax.numpy as jnp

        from te_plugin.jax import attention

        kinds = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
        q, k, v, dout = (jnp.asarray(inputs[name], dtype=kinds[dtype]) for name in ("q", "k", "v", "dout"))
        keys = {} if case.self_attention else {"cu_seqlens_kv": jnp.asarray(case.cu_k)}
        if case.gaps:
            keys |= {"cu_seqlens_q_padded": jnp.asarray(case.start_q)}
            keys |= {} if case.self_attention else {"cu_seqlens_kv_padded": jnp.asarray(case.start_k)}

        def run(q, k, v):
            return attention(q, k, v, cu_seqlens_q=jnp.asarray(case.cu_q), mask=case.mask, window=case.window,
                             softmax_scale=case.scale, kernel=kernel, **keys, **options)  # fmt: skip

        if not backward:
            return {"out": np.asarray(run(q, k, v)).astype(np.float64)}
        out, pull = jax.vjp(run, q, k, v)
        grads = pull(dout.astype(out.dtype))
        result = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
        return {name: np.asarray(x).astype(np.float64) for name, x in result.items()}


@dataclass(frozen=True)
class Implementation:
    """A registered kernel as one runner calls it."""

    runner: RawRunner | TorchRunner | JaxRunner
    kernel: Kernel

    def __str__(self) -> str:
        return f"{self.kernel.name}-{self.runner.name}"

    def supports(self, problem) -> bool:
        """Whether the plan of this kernel on this machine exists; the reason is checked by the tests of refusals."""
        try:
            self.runner.plan(problem, self.kernel.name)
        except PlanError:
            return False
        return True


def runners() -> list:
    found = [RawRunner("cpu", "cpu"), TorchRunner("cpu", "cpu")]
    if importlib.util.find_spec("te_plugin.jax") and _mirrors_attention():
        found.append(JaxRunner("cpu", "cpu"))
    if torch.cuda.is_available():
        from te_plugin.plan import detect_target

        found += [RawRunner(detect_target().arch, "cuda"), TorchRunner(detect_target().arch, "cuda")]
    return found


def _mirrors_attention() -> bool:
    spec = importlib.util.find_spec("te_plugin.jax")
    return spec.origin is not None and hasattr(importlib.import_module("te_plugin.jax"), "attention")


RUNNERS = runners()


def implementations(op: str, problem=None) -> list[Implementation]:
    """Every registered kernel as every runner of this machine calls it; with `problem`, those whose plan takes that one.

    A kernel of another architecture (sm90 on a machine without a GPU) is refused by its plan.
    """
    found = [Implementation(r, kernel) for kernel in registered(op) for r in RUNNERS if r.can_call(kernel)]
    return found if problem is None else [i for i in found if i.supports(problem)]


def parameter(implementation: Implementation, *values, name: str):
    """A pytest parameter; kernels of a GPU carry its mark."""
    marks = [pytest.mark.gpu] if implementation.runner.device == "cuda" else []
    return pytest.param(implementation, *values, id=f"{implementation}-{name}", marks=marks)


def to_torch(x, dtype: str, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(device=device, dtype=TORCH_DTYPE[dtype])


def nan_tensor(shape, dtype: str, device: str = "cpu") -> torch.Tensor:
    """Memory that no kernel may leave as it is: NaN, or 0xFF bytes."""
    kind = TORCH_DTYPE[dtype]
    if kind.is_floating_point and kind.itemsize > 1:
        return torch.full(tuple(shape), float("nan"), dtype=kind, device=device)
    return torch.full(tuple(shape), 0xFF, dtype=torch.uint8, device=device).view(kind)


def numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
