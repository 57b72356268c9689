"""The problems of a whole run: what one microbatch on one rank asks of each op, from the configuration alone.

`explain`, `check`, `validate` and the run directory read these same plans. Imports no framework.
"""

from __future__ import annotations

from dataclasses import replace

from te_plugin import numerics
from te_plugin.ops.activation.problem import ActivationProblem
from te_plugin.ops.activation_quantize.problem import ActivationQuantizeProblem
from te_plugin.ops.attention.cudnn import rows_one_by_one
from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.ops.fused_checks import SEPARATE
from te_plugin.ops.gemm.problem import GemmProblem
from te_plugin.ops.grouped_gemm.problem import LARGE_EXPERT, GroupedGemmProblem
from te_plugin.ops.loss.problem import LossProblem
from te_plugin.ops.norm.problem import NormProblem
from te_plugin.ops.norm_quantize.problem import NormQuantizeProblem
from te_plugin.ops.quantize.problem import QuantizeProblem
from te_plugin.ops.quantize_many.problem import QuantizeManyProblem
from te_plugin.ops.rope.problem import RopeProblem
from te_plugin.plan import Plan, Target, plan

ADAPTER_FRAMEWORK = {"megatron": "torch", "maxtext": "jax"}


def run_dtype(cfg) -> str:
    """Data type of activations and parameters."""
    return "fp32" if cfg.precision.name == "fp32" else "bf16"


def run_target(cfg) -> Target:
    """The target that a run is planned for: run.target by name, or this machine as run.device says."""
    framework = ADAPTER_FRAMEWORK[cfg.adapter.name]
    if cfg.run.target != "auto":
        return Target(cfg.run.target, framework)
    if cfg.run.device == "cpu":
        return Target("cpu", framework, local=True)
    if cfg.run.device == "cuda" or _cuda_visible(framework):
        return Target(_cuda_arch(framework), framework, local=True)
    return Target("cpu", framework, local=True)


def _cuda_visible(framework: str) -> bool:
    if framework == "torch":
        import torch

        return torch.cuda.is_available()
    import jax

    return jax.default_backend() == "gpu"


def _cuda_arch(framework: str) -> str:
    if framework == "torch":
        import torch

        from te_plugin.torch.call import target_of

        return target_of(torch.device("cuda", 0)).arch
    from te_plugin.jax.call import target_of_backend

    return target_of_backend().arch


def is_fused(cfg) -> bool:
    """Whether the model's norms belong to the linear layers after them and its MLP is one call (precision.fuse)."""
    return cfg.precision.fuse and numerics.scaling(cfg.precision.name) is not None and cfg.adapter.name == "megatron"


def problems_of(cfg) -> list[tuple[str, object]]:
    """(label, problem) of every op in one microbatch on one rank, in the order of a layer; "weights" run once a step.

    "norm" serves the final norm and every norm's backward also where the forward of the others is fused.
    """
    if cfg.adapter.name == "maxtext":
        return _maxtext_problems(cfg)
    model, tp = cfg.model, cfg.parallel.tensor_parallel
    tokens = cfg.schedule.micro_rows * cfg.data.seq_len
    heads, kv_heads = model.num_heads // tp, max(model.num_kv_heads // tp, 1)
    dtype = run_dtype(cfg)
    problems: list[tuple[str, object]] = [
        ("norm", NormProblem(tokens, model.hidden_size, dtype, model.norm_eps)),
        ("rope.q", RopeProblem(tokens, heads, model.head_dim, dtype)),
        ("rope.k", RopeProblem(tokens, kv_heads, model.head_dim, dtype)),
        ("attention", attention_problem(cfg, cfg.schedule.micro_rows)),
    ]
    linears = {
        "linear_qkv": ((heads + 2 * kv_heads) * model.head_dim, model.hidden_size),
        "linear_proj": (model.hidden_size, heads * model.head_dim),
    }
    if cfg.moe.num_experts == 0:
        ffn = model.ffn_hidden_size // tp
        linears |= {"linear_fc1": (2 * ffn, model.hidden_size), "linear_fc2": (model.hidden_size, ffn)}
        if not is_fused(cfg) or cfg.precision.bf16_layers_at_start + cfg.precision.bf16_layers_at_end:
            problems.append(("swiglu", ActivationProblem(tokens, ffn, dtype)))
    else:
        ffn, rows = cfg.moe.ffn_hidden_size // tp, tokens * cfg.moe.top_k
        experts = cfg.moe.num_experts // cfg.parallel.expert_parallel
        problems += expert_problems("experts_fc1", rows, 2 * ffn, model.hidden_size, experts, dtype, cfg.precision)
        problems += expert_problems("experts_fc2", rows, model.hidden_size, ffn, experts, dtype, cfg.precision)
        problems.append(("swiglu", ActivationProblem(rows, ffn, dtype)))
    for name, (n, k) in linears.items():
        problems += linear_problems(name, tokens, n, k, dtype, cfg.precision.name, cfg.precision.pow2_scale,
                                    cfg.parallel.grad_accum_fusion, cfg.precision.forward_accumulation)
    if is_fused(cfg):
        problems = [fused_cast(cfg, label, problem) for label, problem in problems]
    if refreshes_weights(cfg):
        matrices = list(linears.values())
        if cfg.moe.num_experts:
            matrices += [(2 * ffn, model.hidden_size)] * experts + [(model.hidden_size, ffn)] * experts
        problems.append(("weights.quantize", weights_problem(cfg, matrices)))
    problems.append(("loss", LossProblem(tokens, model.vocab_size // tp, dtype)))
    return problems


def refreshes_weights(cfg) -> bool:
    """Whether a step begins with the quantisation of all weights together; the layers' own casts run in the first step then."""
    return (numerics.scaling(cfg.precision.name) is not None and cfg.precision.weight_cache == "per_step"
            and cfg.parallel.name != "fsdp2" and cfg.adapter.name == "megatron" and _fp8_layers(cfg) > 0)


def _fp8_layers(cfg) -> int:
    return cfg.model.num_layers - cfg.precision.bf16_layers_at_start - cfg.precision.bf16_layers_at_end


def weights_problem(cfg, matrices: list[tuple[int, int]]) -> QuantizeManyProblem:
    """The weights of all FP8 layers of a rank, from the (rows, columns) of one layer's."""
    kind, precision = numerics.scaling(cfg.precision.name), cfg.precision
    casts = (QuantizeProblem.of_operand(*matrix, run_dtype(cfg), kind, "weight", precision.pow2_scale, precision.keep_transpose)
             for matrix in matrices * _fp8_layers(cfg))
    return QuantizeManyProblem.of(casts)


def fused_cast(cfg, label: str, problem) -> tuple[str, object]:
    """(label, problem), or those of the fused launch that replaces a quantisation and the op before it."""
    layer, _, launch = label.rpartition(".")
    if label in ("linear_qkv.quantize_x", "linear_fc1.quantize_x"):
        if cfg.parallel.sequence_parallel:  # the tokens are gathered between norm and quantisation
            return label, problem
        return f"{layer}.norm_{launch}", NormQuantizeProblem(problem, cfg.model.norm_eps)
    if label == "linear_fc2.quantize_x":
        return f"{layer}.swiglu_{launch}", ActivationQuantizeProblem(problem)
    if label == "linear_fc1.quantize_dy":
        return f"{layer}.dswiglu_{launch}", ActivationQuantizeProblem(problem, gradient=True)
    return label, problem


def parts_of(label: str, made: Plan) -> list[tuple[str, object]]:
    """(label, problem) of the launches behind a plan that runs the parts of its problem one after the other."""
    if made.kernel.name != SEPARATE or made.problem.op == "quantize_many":  # every layer's quantize_w is a row already
        return []
    layer, _, launch = label.rpartition(".")  # linear_qkv.norm_quantize_x is linear_qkv.norm, then linear_qkv.quantize_x
    return [(f"{layer}.{name}", part) for name, (_, part) in zip(launch.split("_", 1), made.problem.parts(), strict=True)]


def attention_problem(cfg, rows: int) -> AttentionProblem:
    """The attention of some rows of a microbatch on one rank."""
    model, tp = cfg.model, cfg.parallel.tensor_parallel
    tokens = rows * cfg.data.seq_len
    window = (-1 if cfg.attention.window_left is None else cfg.attention.window_left, -1)
    segments = rows * (cfg.layout.max_segments if cfg.layout.name == "thd" else 1)
    return AttentionProblem(
        tokens_q=tokens, tokens_kv=tokens, segments=segments, heads=model.num_heads // tp,
        kv_heads=max(model.num_kv_heads // tp, 1), head_dim=model.head_dim, dtype=run_dtype(cfg), mask="causal", window=window,
        precision=cfg.attention.precision, deterministic=cfg.attention.deterministic,
        dq_accumulation=cfg.attention.dq_accumulation, gaps=True)


def _maxtext_problems(cfg) -> list[tuple[str, object]]:
    """Under MaxText norms, RoPE, SwiGLU, router and loss are MaxText's own, and every projection is a layer of its own.

    A device's part, where its mesh splits features over tensor_parallel and rows over the rest.
    """
    model, tp, dtype = cfg.model, cfg.parallel.tensor_parallel, run_dtype(cfg)
    tokens = cfg.schedule.micro_rows * cfg.data.seq_len
    q, kv = model.num_heads * model.head_dim // tp, max(model.num_kv_heads // tp, 1) * model.head_dim
    linears = {"query": (q, model.hidden_size), "key": (kv, model.hidden_size), "value": (kv, model.hidden_size),
               "out": (model.hidden_size, q)}
    attention = attention_problem(cfg, cfg.schedule.micro_rows)
    if rows_one_by_one(attention, run_target(cfg), cfg.attention.kernel, cfg.run.fallback):
        attention = attention_problem(cfg, 1)
    problems: list[tuple[str, object]] = [("attention", attention)]
    if cfg.moe.num_experts == 0:
        ffn = model.ffn_hidden_size // tp
        linears |= {"wi_0": (ffn, model.hidden_size), "wi_1": (ffn, model.hidden_size), "wo": (model.hidden_size, ffn)}
    else:
        ffn, rows = cfg.moe.ffn_hidden_size // tp, tokens * cfg.moe.top_k
        for name, (n, k) in {"experts_wi": (ffn, model.hidden_size), "experts_wo": (model.hidden_size, ffn)}.items():
            problems += expert_problems(name, rows, n, k, cfg.moe.num_experts, dtype, cfg.precision, one_by_one=True)
    for name, (n, k) in linears.items():
        problems += _kn_linear_problems(name, tokens, n, k, dtype, cfg.precision)
    return problems


def _kn_linear_problems(name: str, m: int, n: int, k: int, dtype: str, precision) -> list[tuple[str, object]]:
    """As linear_problems for a weight that lies as [k,n], in JAX: copies are transposed only where scales depend on direction."""
    kind = numerics.scaling(precision.name)
    if kind is None:
        return linear_problems(name, m, n, k, dtype, precision.name)
    fwd, grad = kind.forward_format.name, kind.gradient_format.name
    cast = lambda rows, columns, operand: QuantizeProblem.of_operand(  # noqa: E731
        rows, columns, dtype, kind, operand, precision.pow2_scale, getattr(kind, operand) not in ("tensor", "block_128x128"))
    return [
        (f"{name}.quantize_x", cast(m, k, "activation")),
        (f"{name}.quantize_w", cast(k, n, "weight")),
        (f"{name}.quantize_dy", cast(m, n, "gradient")),
        (f"{name}.forward", GemmProblem(m, n, k, fwd, fwd, kind.activation, kind.weight, dtype)),
        (f"{name}.dgrad", GemmProblem(m, k, n, grad, fwd, kind.gradient, kind.weight, dtype)),
        # The gradient's format, where it is one of its own (E5M2), is a kernel's first operand; the product is turned then.
        (f"{name}.wgrad", GemmProblem(k, n, m, fwd, grad, kind.activation, kind.gradient, dtype) if grad == fwd else
         GemmProblem(n, k, m, grad, fwd, kind.gradient, kind.activation, dtype)),
    ]


def linear_problems(name: str, m: int, n: int, k: int, dtype: str, precision: str, pow2: bool = False,
                    accumulate: bool = False, forward_accumulation: str = "fp32") -> list[tuple[str, object]]:
    """The quantisations and the three products of one linear layer y[m,n] = x[m,k] w[n,k]^T."""
    kind = numerics.scaling(precision)
    wgrad_dtype = "fp32" if accumulate else dtype
    if kind is None:
        return [
            (f"{name}.forward", GemmProblem(m, n, k, dtype, dtype, None, None, dtype)),
            (f"{name}.dgrad", GemmProblem(m, k, n, dtype, dtype, None, None, dtype)),
            (f"{name}.wgrad", GemmProblem(n, k, m, dtype, dtype, None, None, wgrad_dtype, accumulate)),
        ]
    fwd, grad = kind.forward_format.name, kind.gradient_format.name
    cast = lambda rows, columns, operand: QuantizeProblem.of_operand(  # noqa: E731
        rows, columns, dtype, kind, operand, pow2, transpose=True)
    return [
        (f"{name}.quantize_x", cast(m, k, "activation")),
        (f"{name}.quantize_w", cast(n, k, "weight")),
        (f"{name}.quantize_dy", cast(m, n, "gradient")),
        (f"{name}.forward", GemmProblem(m, n, k, fwd, fwd, kind.activation, kind.weight, dtype,
                                        accumulation=forward_accumulation)),
        (f"{name}.dgrad", GemmProblem(m, k, n, grad, fwd, kind.gradient, kind.weight, dtype)),
        (f"{name}.wgrad", GemmProblem(n, k, m, grad, fwd, kind.gradient, kind.activation, wgrad_dtype, accumulate)),
    ]


def expert_problems(name: str, rows: int, n: int, k: int, experts: int, dtype: str, precision,
                    one_by_one: bool = False) -> list[tuple[str, object]]:
    """The quantisations and the three products of a grouped linear y[rows,n] = x[rows,k] w[experts,n,k]^T.

    one_by_one: the weights of experts are quantised in a loop (JAX always, torch where they are large), not as one matrix whose
    rows are those of all experts.
    """
    products = [(f"{name}.{stage}", GroupedGemmProblem(rows, *pair, experts, dtype, precision.name, stage))
                for stage, pair in (("forward", (n, k)), ("dgrad", (k, n)), ("wgrad", (n, k)))]
    kind = numerics.scaling(precision.name)
    if kind is None:
        return products
    cast = lambda r, c, operand, transpose=True: QuantizeProblem.of_operand(  # noqa: E731
        r, c, dtype, kind, operand, precision.pow2_scale, transpose)
    if one_by_one or n * k >= LARGE_EXPERT:
        weight = cast(n, k, "weight")
    elif kind.weight == "tensor":
        weight = replace(cast(experts, n * k, "weight", transpose=False), granularity="row")  # an expert is one row
    else:
        weight = cast(experts * n, k, "weight", transpose=False)
    return [(f"{name}.quantize_x", cast(rows, k, "activation")), (f"{name}.quantize_w", weight),
            (f"{name}.quantize_dy", cast(rows, n, "gradient")), *products]


def plan_run(cfg, target: Target | str | None = None) -> dict[str, Plan]:
    """label -> Plan for every op of a run. PlanError when one of them cannot run; the message starts with its label."""
    target = run_target(cfg) if target is None else target
    if isinstance(target, str):
        target = Target(target, ADAPTER_FRAMEWORK[cfg.adapter.name])
    plans = {}
    for label, problem in problems_of(cfg):
        kernel = cfg.attention.kernel if problem.op == "attention" else "auto"
        plans[label] = plan(problem, target, kernel, cfg.run.fallback)
        for part_label, part in parts_of(label, plans[label]):
            plans[part_label] = plan(part, target, "auto", cfg.run.fallback)
    return plans
