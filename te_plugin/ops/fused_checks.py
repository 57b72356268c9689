"""What the ops that end in a quantisation share: the limits of the fused kernels, and the way without fusion.

A problem of such an op has `parts()`: the op and the quantisation, or the quantisations, that its kernel replaces.
"""

from __future__ import annotations

from te_plugin import numerics
from te_plugin.ops.checks import first_reason, wrong_arch, wrong_dtype
from te_plugin.ops.quantize.problem import QuantizeProblem
from te_plugin.plan import Kernel, PlanError, Supported, Target, Unsupported, plan, registered

SEPARATE = "separate"


def sm90_reason(cast: QuantizeProblem, columns: int, target: Target) -> str | None:
    """Limits that the fused kernels of csrc/sm90/fused.cu have in common. columns: of the op before the cast."""
    return first_reason(
        wrong_arch(target, "sm90"),
        "is wired for torch only" if target.framework == "jax" else None,
        wrong_dtype(cast.dtype, "bf16"),
        f"writes the OCP formats e4m3 and e5m2, not {cast.format}" if cast.format not in ("e4m3", "e5m2") else None,
        f"writes e5m2 with one scale a tensor only, not per {cast.granularity}"
        if cast.format == "e5m2" and cast.granularity != "tensor" else None,
        f"{columns} columns are not a multiple of 8" if columns % 8 else None,
    )


def quantize_attributes(problem) -> tuple[int, ...]:
    """Granularity code, format code, pow2: what the fused functions take after the tensors."""
    cast = problem.cast
    return (numerics.GRANULARITY_CODE[cast.granularity], numerics.FORMATS[cast.format].code, int(cast.pow2_scale))


def separate_supports(problem, target: Target, fallback: str = "allow") -> Supported | Unsupported:
    """All parts have a kernel. fallback "allow": their own plans say whether framework maths may be one of them."""
    if target.framework == "jax":
        return Unsupported("is wired for torch only")
    names = []
    for name, part in problem.parts():
        try:
            names.append(f"{name} {plan(part, target, fallback=fallback).kernel.name}")
        except PlanError:
            reasons = (_reason(kernel, part, target) for kernel in registered(part.op))
            return Unsupported(f"has no kernel for {name}: {'; '.join(reasons)}")
    return Supported(f"one after the other: {', '.join(dict.fromkeys(names))}")


def _reason(kernel: Kernel, problem, target: Target) -> str:
    """Why a kernel was not taken; one that could run was refused as a fallback."""
    answer = kernel.supports(problem, target)
    return f"{kernel.name} {'is framework maths' if answer else answer.reason}"
