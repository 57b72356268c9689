"""The support matrix: which kernel can run which case on which target, asked of `supports()` and never typed by hand.

    python -m te_plugin.support_matrix                    print it
    python -m te_plugin.support_matrix --write README.md  renew the block between the markers of a file
    python -m te_plugin.support_matrix --check README.md  exit code 1 when that block is stale
"""

from __future__ import annotations

import functools
import sys

from te_plugin import numerics
from te_plugin.generated import GeneratedBlock
from te_plugin.ops.activation.problem import ActivationProblem
from te_plugin.ops.activation_quantize.problem import ActivationQuantizeProblem
from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.ops.grouped_gemm.problem import GroupedGemmProblem
from te_plugin.ops.loss.problem import LossProblem
from te_plugin.ops.norm.problem import NormProblem
from te_plugin.ops.norm_quantize.problem import NormQuantizeProblem
from te_plugin.ops.qkv_rope.problem import QkvRopeProblem
from te_plugin.ops.qkv_rope_quantize.problem import QkvRopeQuantizeProblem
from te_plugin.ops.quantize.problem import QuantizeProblem
from te_plugin.ops.quantize_many.problem import QuantizeManyProblem
from te_plugin.ops.rope.problem import RopeProblem
from te_plugin.plan import ARCHITECTURES, FRAMEWORKS, Target, registered

FRAMEWORK_NAMES = {"torch": "torch", "jax": "JAX"}


def cases() -> list[tuple[str, object]]:
    """(what the row says, the problem that is asked). Sizes are those of a layer of llama3.1-8B with 8,192 tokens."""
    tokens, hidden, ffn, heads, kv_heads = 8192, 4096, 14336, 32, 8

    def attention(says: str, head_dim: int = 128, **options):
        return says, AttentionProblem(tokens, tokens, 64, heads, kv_heads, head_dim, **options)

    found = [
        attention("packed causal, BF16, head dim 128", gaps=True),
        attention("packed causal, FP32", dtype="fp32"),
        attention("head dim 64", 64),
        attention("head dim 120", 120),
        attention("head dim 256", 256),
        attention("sliding window", window=(1024, 0)),
        attention("q and kv of different lengths", mask="causal_bottom_right"),
        attention("deterministic backward", deterministic=True),
        attention("dQ accumulated in BF16", dq_accumulation="bf16", segment_capacity=tokens),
        attention("FP8", precision="fp8"),
    ]
    names = {"tensor": "scale a tensor", "row": "scale a row", "block_1x128": "scale a 1x128 block",
             "block_128x128": "scale a 128x128 block", "mx": "MX, 32 values"}
    found += [(f"{says}, with transposed copy", QuantizeProblem(tokens, hidden, granularity=granularity, transpose=True))
              for granularity, says in names.items()]
    found.append(("given scale (delayed)", QuantizeProblem(tokens, hidden, transpose=True, delayed=True)))
    found.append(("FNUZ formats", QuantizeProblem(tokens, hidden, format="e4m3_fnuz", transpose=True)))
    for says, fmt in (("E4M3", "e4m3"), ("FNUZ formats", "e4m3_fnuz")):
        layer = [QuantizeProblem(*shape, format=fmt, transpose=True) for shape in ((2 * ffn, hidden), (hidden, ffn))]
        found.append((f"all weights of a model, {says}", QuantizeManyProblem.of(32 * layer)))
    found += [("BF16", GemmProblem(tokens, ffn, hidden)),
              ("FP32", GemmProblem(tokens, ffn, hidden, "fp32", "fp32", out_dtype="fp32"))]
    for name, kind in numerics.SCALINGS.items():
        found.append((name, GemmProblem(tokens, ffn, hidden, "e4m3", "e4m3", kind.activation, kind.weight)))
    found.append(("fp8_current, fast accumulation",
                  GemmProblem(tokens, ffn, hidden, "e4m3", "e4m3", "tensor", "tensor", accumulation="fast")))
    main_grad = GemmProblem(ffn, hidden, tokens, "e5m2", "e4m3", "tensor", "tensor", "fp32", accumulate=True)
    found.append(("FP8 into an FP32 main_grad", main_grad))
    found += [(name, GroupedGemmProblem(tokens, ffn, hidden, 8, precision=name)) for name in ("bf16", *numerics.SCALINGS)]
    cast = functools.partial(QuantizeProblem, tokens, transpose=True)
    split = functools.partial(QkvRopeProblem, tokens, heads, kv_heads, 128)
    found += [("RMSNorm", NormProblem(tokens, hidden)), ("SwiGLU", ActivationProblem(tokens, ffn)),
              ("RMSNorm, FP8 output", NormQuantizeProblem(cast(hidden))),
              ("RMSNorm, FP8 output from FP32", NormQuantizeProblem(cast(hidden, "fp32"))),
              ("SwiGLU, FP8 output", ActivationQuantizeProblem(cast(ffn))),
              ("gradient of SwiGLU, FP8 output", ActivationQuantizeProblem(cast(2 * ffn), gradient=True)),
              ("by positions", RopeProblem(tokens, heads, 128)),
              ("split of QKV and RoPE", split()),
              ("heads grouped by kv head", split("grouped")),
              ("split of QKV and RoPE, FP8 output", QkvRopeQuantizeProblem(split())),
              ("given scales (delayed)", QkvRopeQuantizeProblem(split(), delayed=True)),
              ("FP8 output from FP32", QkvRopeQuantizeProblem(split(dtype="fp32"))),
              ("cross-entropy, vocabulary 128,256", LossProblem(tokens, 128256))]
    return found


def cell(problem, arch: str) -> str:
    """The kernels that can run a problem, in the order in which `auto` takes them."""
    found = []
    for kernel in registered(problem.op):
        able = [f for f in FRAMEWORKS if kernel.supports(problem, Target(arch, f))]
        if not able:
            continue
        where = "" if len(able) == len(FRAMEWORKS) else f" ({', '.join(FRAMEWORK_NAMES[f] for f in able)})"
        mark = "*" if kernel.composite and arch != "cpu" else ""
        found.append(f"{kernel.name}{mark}{where}")
    return ", ".join(found) or "-"


def markdown() -> str:
    lines = ["| op | case | " + " | ".join(ARCHITECTURES) + " |", "|---" * (2 + len(ARCHITECTURES)) + "|"]
    alike: dict[tuple, list[str]] = {}  # cases of one op that every target answers in the same way share a row
    for says, problem in cases():
        alike.setdefault((problem.op, *(cell(problem, arch) for arch in ARCHITECTURES)), []).append(says)
    for (op, *cells), says in alike.items():
        lines.append(f"| {op} | {'; '.join(says)} | " + " | ".join(cells) + " |")
    lines += ["", "Kernels are in the order in which `kernel=auto` takes them. `composite` is framework maths; with * it counts "
              "as a fallback and runs only with `run.fallback=warn` or `allow`. (torch) or (JAX): in that framework only. "
              "`te-plugin explain recipe=NAME target=ARCH` gives the reason behind every gap."]
    return "\n".join(lines)


BLOCK = GeneratedBlock("te_plugin.support_matrix", "support matrix", markdown)
BEGIN, END = BLOCK.begin, BLOCK.end


def block() -> str:
    return BLOCK.text()


def main(argv: list[str] | None = None) -> int:
    return BLOCK.main(argv)


if __name__ == "__main__":
    sys.exit(main())
