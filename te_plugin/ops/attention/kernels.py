"""The attention kernels, in the order in which `auto` asks them."""

from __future__ import annotations

import importlib.util

from te_plugin.ops.attention.cudnn import absent_in_jax, backward_scratch, xla_scratch
from te_plugin.ops.attention.problem import DQ_CODE, MASK_CODE, AttentionProblem
from te_plugin.ops.checks import FLOAT_DTYPES, first_reason, wrong_arch, wrong_dtype
from te_plugin.plan import BufferSpec, Kernel, Supported, Target, Unsupported, register

MAX_HEAD_DIM = 256
PADDED_HEAD_DIM = 128
ROW_MULTIPLE = 16


def dq_buffers(problem: AttentionProblem, splits: int = 1) -> tuple[BufferSpec, ...]:
    """The dQ accumulator of a kernel that adds partial dQ in memory.

    fp32: packed (splits, H, total_q, D); a row's place is its row in the pack, so segments need no stride of their own.
    bf16: per segment, padded: (splits, N, H, P, 128) with P = capacity of one segment rounded up to 16.
    Handing the first layout to a kernel that expects the second writes every segment into slot 0: only the kernel that will
    run may choose, which is why this is called from Kernel.buffers and nowhere else.
    """
    if not problem.needs_backward:
        return ()
    heads, rows = problem.heads, problem.tokens_q
    if problem.dq_accumulation == "fp32":
        shape = (splits, heads, rows, problem.head_dim)
        strides = (heads * rows * problem.head_dim, rows * problem.head_dim, problem.head_dim, 1)
        return (BufferSpec("dq_acc", "backward", shape, "fp32", strides),)
    capacity = problem.segment_capacity if problem.segment_capacity is not None else rows
    padded = -(-capacity // ROW_MULTIPLE) * ROW_MULTIPLE
    shape = (splits, problem.segments, heads, padded, PADDED_HEAD_DIM)
    strides = (problem.segments * heads * padded * PADDED_HEAD_DIM, heads * padded * PADDED_HEAD_DIM,
               padded * PADDED_HEAD_DIM, PADDED_HEAD_DIM, 1)
    return (BufferSpec("dq_acc", "backward", shape, "bf16", strides),)


def attributes(problem: AttentionProblem) -> tuple[int | float, ...]:
    """mask code, window left, window right, softmax scale; the backward takes the dQ layout's code after them."""
    return (MASK_CODE[problem.mask], *problem.window, problem.scale, DQ_CODE[problem.dq_accumulation])


OPERANDS = "q,k,v [T,H,D] THD"


def describe_operands(problem: AttentionProblem) -> str:
    """The layout of a kernel that asks for no dQ accumulator of ours."""
    return OPERANDS


def describe_layout(problem: AttentionProblem) -> str:
    layout = "packed (splits,H,T,D) fp32" if problem.dq_accumulation == "fp32" else "per segment (splits,N,H,P,128) bf16"
    return f"{OPERANDS}; dQ accumulator {layout}" if problem.needs_backward else OPERANDS


def _cpu_supports(problem: AttentionProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "cpu"),
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
        f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}" if problem.head_dim > MAX_HEAD_DIM else None,
        "computes in the dtype of the tensors, not in FP8" if problem.precision == "fp8" else None,
        _bf16_dq_reason(problem),
    )
    return Unsupported(reason) if reason else Supported()


def _bf16_dq_reason(problem: AttentionProblem) -> str | None:
    if problem.dq_accumulation == "bf16" and problem.needs_backward and problem.head_dim > PADDED_HEAD_DIM:
        return f"dq_accumulation=bf16 holds rows of {PADDED_HEAD_DIM}, head_dim is {problem.head_dim}; use fp32"
    return None


CPU = register(Kernel(
    name="cpu",
    op="attention",
    supports=_cpu_supports,
    library="cpu",
    entry_points={"forward": "attention_forward", "backward": "attention_backward"},
    buffers=dq_buffers,
    attributes=attributes,
    describe_layout=describe_layout,
))


def _cpu_fp8_supports(problem: AttentionProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "cpu"),
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
        "quantises its operands; ask with precision=fp8" if problem.precision != "fp8" else None,
        "is wired for torch only" if target.framework == "jax" else None,
        f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}" if problem.head_dim > MAX_HEAD_DIM else None,
        _bf16_dq_reason(problem),
    )
    return Unsupported(reason) if reason else Supported("reference: FP8 operands, P and dS, multiplied in FP32")


CPU_FP8 = register(Kernel(
    name="cpu_fp8",
    op="attention",
    supports=_cpu_fp8_supports,
    library="cpu",
    entry_points={"quantize": "attention_quantize", "forward": "attention_fp8_forward", "backward": "attention_fp8_backward"},
    buffers=dq_buffers,
    attributes=attributes,
    describe_layout=describe_layout,
))


def _cudnn_supports(problem: AttentionProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90"),
        "is wired for torch only" if target.framework == "jax" else None,
        wrong_dtype(problem.dtype, "bf16", "fp16"),
        *_packed_causal_reasons(problem),
        "has a deterministic backward, but its scratch grows with segments x tokens x tokens" if problem.deterministic else None,
        "nvidia-cudnn-frontend is not installed; pip install 'te_plugin[cudnn]'"
        if target.local and importlib.util.find_spec("cudnn") is None else None,
    )
    return Unsupported(reason) if reason else Supported("cuDNN's packed kernels, from the extra te_plugin[cudnn]; "
                                                            "at most this scratch: it says how much when it builds a graph")


CUDNN = register(Kernel(name="cudnn", op="attention", supports=_cudnn_supports, attributes=attributes,
                        helpers=(("sm90", "segment_offsets"), ("sm90", "fill_outside")), own_scratch=backward_scratch,
                        describe_layout=describe_operands))


def _xla_supports(problem: AttentionProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        "is cuDNN as XLA calls it, for JAX only; in torch it is called cudnn" if target.framework != "jax" else None,
        wrong_arch(target, "sm90"),
        wrong_dtype(problem.dtype, "bf16", "fp16"),
        *_packed_causal_reasons(problem),
        "is not deterministic in its backward" if problem.deterministic else None,
        f"XLA's packed call takes no window, {problem.window} was asked for" if problem.window[0] >= 0 else None,
        "XLA counts the values of q in 32 bits" if problem.tokens_q * problem.heads * problem.head_dim >= 2**31 else None,
        f"this JAX has no {absent_in_jax()}, by which it is called" if target.local and absent_in_jax() else None,
    )
    return Unsupported(reason) if reason else Supported("cuDNN's packed kernels, called by XLA")


XLA = register(Kernel(name="xla", op="attention", supports=_xla_supports, attributes=attributes, own_scratch=xla_scratch,
                      describe_layout=describe_operands))


def _packed_causal_reasons(problem: AttentionProblem) -> tuple[str | None, ...]:
    """What keeps a problem from torch's FlashAttention and from cuDNN alike."""
    return (
        "computes in the dtype of the tensors, not in FP8" if problem.precision == "fp8" else None,
        f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}" if problem.head_dim > MAX_HEAD_DIM else None,
        f"head_dim {problem.head_dim} is not a multiple of 8" if problem.head_dim % 8 else None,
        f"mask {problem.mask} is not among its masks (causal)" if problem.mask != "causal" else None,
        "accumulates dQ in fp32 only" if problem.dq_accumulation == "bf16" else None,
        f"window {problem.window} looks to the right of a causal row" if problem.window[1] > 0 else None,
    )


def _flash_supports(problem: AttentionProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_arch(target, "sm90", "sm100"),
        "is torch's own kernel (FlashAttention 2), for torch only" if target.framework == "jax" else None,
        wrong_dtype(problem.dtype, "bf16", "fp16"),
        *_packed_causal_reasons(problem),
        "adds dQ with atomics, which is not deterministic" if problem.deterministic else None,
    )
    return Unsupported(reason) if reason else Supported("torch's FlashAttention 2 for packed segments")


FLASH = register(Kernel(name="flash", op="attention", supports=_flash_supports, attributes=attributes,
                        describe_layout=describe_operands))


def _composite_supports(problem: AttentionProblem, target: Target) -> Supported | Unsupported:
    reason = first_reason(
        wrong_dtype(problem.dtype, *FLOAT_DTYPES),
        "computes in the dtype of the tensors, not in FP8" if problem.precision == "fp8" else None,
        "keeps no dQ accumulator, so it cannot accumulate dQ in bf16" if problem.dq_accumulation == "bf16" else None,
    )
    return Unsupported(reason) if reason else Supported("framework maths, the whole T x T score matrix per head")


COMPOSITE = register(Kernel(name="composite", op="attention", supports=_composite_supports, attributes=attributes,
                            composite=True, describe_layout=describe_operands))
