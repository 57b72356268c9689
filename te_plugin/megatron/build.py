"""A Megatron GPTModel from a run's configuration, on a CPU or a GPU, in one process or many."""

from __future__ import annotations

import contextlib
import logging
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from te_plugin.config import ConfigError
from te_plugin.megatron.attention import AttentionOptions
from te_plugin.megatron.loss import zero_padding_rows
from te_plugin.megatron.quant import precision_report, quant_recipe
from te_plugin.megatron.spec import layer_spec
from te_plugin.megatron.weights import initialise
from te_plugin.ops.recipe import is_fused


def initialize(cfg, device: torch.device | str = "cpu") -> None:
    """Process groups for a run: torch.distributed, then Megatron's parallel_state, with the sizes of cfg.parallel.

    Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) it joins that job. Otherwise it makes a job of one
    process around a store in memory: no port is opened, so runs on one machine cannot clash. Groups that exist already are used,
    and must fit.
    """
    device = torch.device(device)
    parallel = cfg.parallel
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device if device.index is not None else int(os.environ.get("LOCAL_RANK", 0)))
        launched = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
        if len(launched) == 4:
            dist.init_process_group(backend)
        elif int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ConfigError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but of RANK, MASTER_ADDR and MASTER_PORT only "
                              f"{', '.join(launched)} are set; start the processes with torchrun, or set all four")
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sizes = dict(tensor_model_parallel_size=parallel.tensor_parallel, pipeline_model_parallel_size=parallel.pipeline_parallel,
                 context_parallel_size=parallel.context_parallel, expert_model_parallel_size=parallel.expert_parallel)
    needed = parallel.tensor_parallel * parallel.pipeline_parallel * parallel.context_parallel
    if dist.get_world_size() % needed:
        raise ConfigError(f"tensor_parallel * pipeline_parallel * context_parallel = {needed} processes make one copy of the "
                          f"model, and the job has {dist.get_world_size()}; start a multiple of {needed} "
                          f"(torchrun --nproc-per-node)")
    if parallel_state.model_parallel_is_initialized():
        have = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size(),
                parallel_state.get_context_parallel_world_size(), parallel_state.get_expert_model_parallel_world_size())
        if have == tuple(sizes.values()):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(cfg.run.seed, force_reset_rng=True)


def transformer_config(cfg, device: torch.device | str = "cpu", *, first_layer: int = 0,
                       num_layers: int | None = None) -> TransformerConfig:
    """Megatron's TransformerConfig of a run. Fusions that need TransformerEngine, Apex or CUDA are off; dropout is 0."""
    model, parallel, moe = cfg.model, cfg.parallel, cfg.moe
    device = torch.device(device)
    dtype = torch.float32 if cfg.precision.name == "fp32" else torch.bfloat16
    on_cpu = device.type == "cpu" or (device.type == "meta" and not torch.cuda.is_available())
    if parallel.sequence_parallel and on_cpu:
        raise ConfigError("parallel.sequence_parallel=true on the CPU: Megatron gathers tokens into CUDA buffers; set it to "
                          "false, or run on a GPU")
    if on_cpu and model.num_kv_heads < parallel.tensor_parallel:
        raise ConfigError(f"parallel.tensor_parallel={parallel.tensor_parallel} with model.num_kv_heads={model.num_kv_heads} on "
                          f"the CPU: Megatron gathers the shared kv heads into CUDA buffers; use at most num_kv_heads "
                          f"processes, or a GPU")
    if parallel.context_parallel > 1:
        raise ConfigError(f"parallel.context_parallel={parallel.context_parallel} with adapter=megatron: the core attention does "
                          f"not exchange keys between ranks; set it to 1")
    experts = {}
    if moe.num_experts:
        if on_cpu and parallel.tensor_parallel * parallel.expert_parallel > 1:
            raise ConfigError("a mixture of experts over several processes on the CPU: Megatron's dispatchers gather tokens into "
                              "CUDA buffers; set parallel.tensor_parallel and parallel.expert_parallel to 1, or run on a GPU")
        experts = dict(
            num_moe_experts=moe.num_experts, moe_router_topk=moe.top_k, moe_ffn_hidden_size=moe.ffn_hidden_size,
            moe_grouped_gemm=moe.grouped_gemm, moe_aux_loss_coeff=moe.aux_loss_coeff, moe_router_dtype="fp32",
            moe_router_load_balancing_type="aux_loss" if moe.aux_loss_coeff else "none",
            # The auxiliary loss is weighted by tokens, like the loss itself (loss.py).
            calculate_per_token_loss=True,
            # The all-to-all dispatcher opens a CUDA stream.
            moe_token_dispatcher_type="allgather" if on_cpu else "alltoall")
    return TransformerConfig(
        num_layers=model.num_layers if num_layers is None else num_layers, hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads, num_query_groups=model.num_kv_heads, kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size, normalization="RMSNorm", layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, init_method_std=model.init_std,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_parallel, sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel, context_parallel_size=parallel.context_parallel,
        expert_model_parallel_size=parallel.expert_parallel,
        # Parameters appear where torch's default device says, and `initialise` fills them: see build_gpt.
        use_cpu_initialization=True, perform_initialization=False,
        # Despite its name: take the activation module that the layer specification names, which is ours.
        use_te_activation_func=True,
        bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, transformer_impl="local",
        cuda_graph_modules=[], quant_recipe=quant_recipe(cfg, first_layer, num_layers), **experts)


def build_gpt(cfg, device: torch.device | str = "cpu") -> GPTModel:
    """The GPTModel of a run (config.Config), on `device`, with its initial weights. `initialize(cfg, device)` comes first.

    The weights depend on cfg.run.seed only: every parallel split, feature toggle and adapter starts from the same numbers.
    device="meta" gives a model without storage: shard it (fully_shard), then call `materialise(model, cfg, device)`.
    ConfigError for what Megatron or this plugin cannot run.
    """
    device = torch.device(device)
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError("build_gpt needs process groups: call te_plugin.megatron.initialize(cfg, device) first")
    first, held = _stage_layers(cfg)
    config = transformer_config(cfg, device, first_layer=first, num_layers=None if held == cfg.model.num_layers else held)
    config.num_layers = cfg.model.num_layers
    return build_stage(cfg, config, device, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())


def build_stage(cfg, config: TransformerConfig, device: torch.device | str, pre_process: bool, post_process: bool) -> GPTModel:
    """One pipeline stage: `pre_process` holds the embedding, `post_process` the final norm and the output layer."""
    device = torch.device(device)
    spec = layer_spec(config, attention=AttentionOptions.from_config(cfg), fallback=cfg.run.fallback, fuse=is_fused(cfg))
    place = contextlib.nullcontext() if device.type == "cpu" else torch.device(device)
    with place, _without_deprecation_notice():
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=cfg.model.vocab_size, max_sequence_length=cfg.data.seq_len,
            pre_process=pre_process, post_process=post_process, position_embedding_type="none",
            share_embeddings_and_output_weights=cfg.model.tie_embeddings)
    model.decoder.register_forward_pre_hook(zero_padding_rows, with_kwargs=True)
    if device.type != "meta":
        initialise(model, cfg)
    _check_precision(cfg, model)
    return model


@contextlib.contextmanager
def _without_deprecation_notice():
    """GPTModel logs at every construction that HybridModel succeeds it; its users cannot act on that, docs/adapters.md does."""
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    hide = lambda record: "IS DEPRECATED" not in record.getMessage()
    logger.addFilter(hide)
    try:
        yield
    finally:
        logger.removeFilter(hide)


def _stage_layers(cfg) -> tuple[int, int]:
    """(first layer, number of layers) of this process's pipeline stage."""
    stages, total = cfg.parallel.pipeline_parallel, cfg.model.num_layers
    if total % stages:
        raise ConfigError(f"model.num_layers={total} is not a multiple of parallel.pipeline_parallel={stages}")
    held = total // stages
    return parallel_state.get_pipeline_model_parallel_rank() * held, held


def _check_precision(cfg, model: GPTModel) -> None:
    """FP8 that was asked for must have reached a layer."""
    report = precision_report(model)
    bf16_layers = cfg.precision.bf16_layers_at_start + cfg.precision.bf16_layers_at_end
    if report and cfg.precision.name not in report.values() and bf16_layers < cfg.model.num_layers \
            and cfg.parallel.pipeline_parallel == 1:
        raise ConfigError(f"precision {cfg.precision.name} reached no linear layer of the model; layers report "
                          f"{', '.join(sorted(set(report.values())))}")
