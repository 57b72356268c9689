"""The GEMM kernels."""

from __future__ import annotations

from te_plugin import numerics
from te_plugin.ops.checks import first_reason, wrong_arch
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.plan import Kernel, Supported, Target, Unsupported, register


def _xla_supports(problem: GemmProblem, target: Target) -> Supported | Unsupported:
    if target.framework != "jax":
        return Unsupported("is XLA's own product, for JAX only")
    if problem.accumulate:
        return Unsupported("XLA adds into no existing array")
    if problem.accumulation == "fast":
        return Unsupported("decides itself how its products add up; fast accumulation cannot be asked of it")
    if problem.scale_a is None and problem.scale_b is None:
        return Supported("XLA's product")
    if target.arch not in ("sm90", "sm100"):
        return Unsupported(f"XLA multiplies FP8 operands on NVIDIA GPUs from sm90, not on {target.arch}")
    if (problem.scale_a, problem.scale_b) != ("tensor", "tensor"):
        return Unsupported(f"XLA takes one scale an operand, not {problem.scale_a} and {problem.scale_b}")
    return Supported("XLA's FP8 product (cuBLASLt)")


# How the two operands of an FP8 product may be scaled, and the number the sm90 kernel gives each pair.
SCALE_KIND = {("tensor", "tensor"): 0, ("row", "row"): 1, ("block_1x128", "block_128x128"): 2, ("block_1x128", "block_1x128"): 3}
ROW_BYTES = 16  # operands are read in rows of this many bytes
CUBLASLT_BLOCK_K = 4 * numerics.BLOCK  # cuBLASLt reads block scales along K four at a time


def _fp8_reason(problem: GemmProblem) -> str | None:
    """Why tensor cores of Hopper cannot multiply these FP8 operands."""
    if problem.scale_a is None or problem.scale_b is None:
        return "multiplies FP8 operands with scales"
    if problem.dtype_a not in ("e4m3", "e5m2") or problem.dtype_b not in ("e4m3", "e5m2"):
        return f"takes OCP formats, not {problem.dtype_a} x {problem.dtype_b}"
    if (problem.scale_a, problem.scale_b) not in SCALE_KIND:
        return f"has no form for scales {problem.scale_a} x {problem.scale_b}"
    if problem.k % ROW_BYTES:
        return f"K={problem.k} is not a multiple of {ROW_BYTES}"
    return None


def _cublaslt_block_reason(problem: GemmProblem, target: Target) -> str | None:
    return first_reason(
        f"has block scales on sm90 only, not on {target.arch}" if target.arch != "sm90" else None,
        "takes e4m3 under block scales" if (problem.dtype_a, problem.dtype_b) != ("e4m3", "e4m3") else None,
        f"writes bf16 or fp32 under block scales, not {problem.out_dtype}" if problem.out_dtype not in ("bf16", "fp32") else None,
        f"M={problem.m} is not a multiple of {ROW_BYTES}" if problem.m % ROW_BYTES else None,
        f"K={problem.k} is not a multiple of {CUBLASLT_BLOCK_K}, which its rows of block scales need"
        if problem.k % CUBLASLT_BLOCK_K else None,
    )


def _fp32_reason(problem: GemmProblem) -> str | None:
    """Why a kernel that adds in FP32 is not taken where fast accumulation is asked for."""
    return "adds in FP32, and accumulation=fast was asked for" if problem.accumulation == "fast" else None


def _cublaslt_fast_reason(problem: GemmProblem, target: Target) -> str | None:
    if problem.accumulation != "fast":
        return None
    return first_reason(
        "adds partial sums of block scales in FP32, and accumulation=fast was asked for"
        if problem.scale_a == "block_1x128" else None,
        f"has fast accumulation on sm90 only, not on {target.arch}" if target.arch != "sm90" else None,
    )


def _cublaslt_supports(problem: GemmProblem, target: Target) -> Supported | Unsupported:
    if reason := wrong_arch(target, "sm90", "sm100"):
        return Unsupported(reason)
    if target.framework == "jax":
        return Unsupported("is reached through torch; JAX has its own name for it, xla")
    if problem.scale_a is None and problem.scale_b is None:
        reason = _fp32_reason(problem)
        return Unsupported(reason) if reason else Supported("the framework's matmul, which is cuBLASLt")
    reason = first_reason(
        _fp8_reason(problem),
        "multiplies e5m2 by e5m2 in no mode" if problem.dtype_a == problem.dtype_b == "e5m2" else None,
        f"N={problem.n} is not a multiple of {ROW_BYTES}" if problem.n % ROW_BYTES else None,
        _cublaslt_fast_reason(problem, target),
        _cublaslt_block_reason(problem, target) if problem.scale_a == "block_1x128" else None,
    )
    return Unsupported(reason) if reason else Supported("fast accumulation" if problem.accumulation == "fast" else "")


CUBLASLT = register(Kernel(name="cublaslt", op="gemm", supports=_cublaslt_supports, measured=True))


def _sm90_supports(problem: GemmProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        _fp8_reason(problem),
        _fp32_reason(problem),
        f"writes bf16 or fp32, not {problem.out_dtype}" if problem.out_dtype not in ("bf16", "fp32") else None,
        "adds into an existing array, which XLA does not have" if problem.accumulate and target.framework == "jax" else None,
        "takes the e5m2 operand first, e4m3 second" if problem.dtype_b != "e4m3" else None,
        "multiplies e4m3 only under block scales" if "block_1x128" == problem.scale_a and problem.dtype_a != "e4m3" else None,
    )
    return Unsupported(reason) if reason else Supported()


def _sm90_attributes(problem: GemmProblem) -> tuple[int, ...]:
    return (numerics.FORMATS[problem.dtype_a].code, numerics.FORMATS[problem.dtype_b].code,
            SCALE_KIND[problem.scale_a, problem.scale_b], int(problem.accumulate))


SM90 = register(Kernel(name="sm90", op="gemm", supports=_sm90_supports, library="sm90", entry_points={"gemm": "gemm_fp8"},
                       attributes=_sm90_attributes, measured=True))


# Behind sm90: on an H200 XLA's FP8 product ran at 528 TFLOP/s where the tensor cores do twice that.
XLA = register(Kernel(name="xla", op="gemm", supports=_xla_supports))


def _composite_supports(problem: GemmProblem, target: Target) -> Supported | Unsupported:
    if reason := _fp32_reason(problem):
        return Unsupported(reason)
    if problem.scale_a is None and problem.scale_b is None:
        return Supported("the framework's matmul")
    return Supported("emulated: FP8 operands are dequantised (exactly), the framework's matmul multiplies in FP32")


COMPOSITE = register(Kernel(name="composite", op="gemm", supports=_composite_supports, composite=True))
