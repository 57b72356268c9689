"""Attention of MaxText on te_plugin's kernels: `attention=te_plugin`.

Legend: B rows, T tokens a row, H query heads, G kv heads, D head dim. The kernel runs inside shard_map: batch and heads may be
split over devices, tokens and head dim may not. Packed rows are given by segment ids, whose capacity a row is static.
"""

from __future__ import annotations

import inspect
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from te_plugin.jax import attention_by_segment_ids
from te_plugin.jax.sharding import axis_names
from te_plugin.maxtext.names import ATTENTION

# Arguments of apply_attention that ask for what the kernels do not do, by the value that asks for nothing.
_UNSUPPORTED_ARGUMENTS = {
    "previous_chunk": (None, "chunked prefill"),
    "bidirectional_mask": (None, "a bidirectional mask"),
    "sinks": (None, "attention sinks"),
    "indexer_mask": (None, "an indexer mask"),
    "compressed_mask": (None, "compressed attention"),
    "decoder_segment_ids_kv": (None, "other segment ids for keys than for queries"),
    "record_max_logits": (False, "recording logits (qk-clip)"),
    "use_ragged_attention": (False, "ragged attention"),
    "pad_kv_total": (0, "padded keys"),
    "compress_ratio": (0, "compressed attention"),
}


def wrap_attention(original, signature: inspect.Signature):
    """apply_attention that runs te_plugin's kernel where the layer's attention kernel is te_plugin."""

    def apply_attention(self, *args, **kwargs):
        if self.attention_kernel != ATTENTION:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        return _apply(self, bound.arguments), None, None

    return apply_attention


def _apply(op, arguments: dict):
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    _refuse(op, arguments)
    config = op.config
    segment_ids = arguments["decoder_segment_ids"]
    if segment_ids is None:
        segment_ids = jnp.ones(query.shape[:2], jnp.int32)
    options = dict(
        max_segments=config.te_plugin_segment_capacity,
        mask="causal",
        softmax_scale=config.te_plugin_softmax_scale or 1.0,
        precision=config.te_plugin_attention_precision,
        dq_accumulation=config.te_plugin_dq_accumulation,
        deterministic=config.te_plugin_deterministic,
        kernel=config.te_plugin_attention_kernel,
        fallback=config.te_plugin_fallback,
    )
    out = _sharded(op, query, key, value, segment_ids, options)
    return checkpoint_name(out, "context")


def _sharded(op, query, key, value, segment_ids, options: dict):
    """Every device runs its rows and heads; nothing is gathered."""
    batch, heads = _split_over(op, query.shape)
    if op.mesh.size == 1:
        return attention_by_segment_ids(query, key, value, segment_ids, **options)
    parts = math.prod(op.mesh.shape[name] for name in heads)
    kv_heads = key.shape[2]
    repeated = kv_heads % parts != 0  # every device then holds all kv heads, and takes those its query heads belong to
    if repeated and parts % kv_heads:
        raise ValueError(
            f"attention={ATTENTION}: {kv_heads} kv heads over {parts} devices ({', '.join(heads)}): one "
            "must be a multiple "
            f"of the other; change the tensor parallelism"
        )
    if query.shape[2] % parts:
        raise ValueError(
            f"attention={ATTENTION}: {query.shape[2]} query heads do not divide over {parts} devices "
            f"({', '.join(heads)})"
        )

    def local(q, k, v, ids):
        if repeated:
            own = jax.lax.axis_index(heads) * kv_heads // parts
            k, v = (jax.lax.dynamic_slice_in_dim(x, own, 1, axis=2) for x in (k, v))
        return attention_by_segment_ids(q, k, v, ids, **options)

    q_spec = PartitionSpec(batch or None, None, heads or None, None)
    kv_spec = PartitionSpec(batch or None, None, None if repeated else (heads or None), None)
    run = jax.shard_map(
        local,
        mesh=op.mesh,
        in_specs=(q_spec, kv_spec, kv_spec, PartitionSpec(batch or None, None)),
        out_specs=q_spec,
        check_vma=False,
    )
    return run(query, key, value, segment_ids)


def _split_over(op, shape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes over which MaxText's rules split batch and heads. ValueError where they split tokens or head dim."""
    spec = op._logical_to_mesh_axes(op.flash_axis_names_q)  # (batch, heads, tokens, head dim)
    used = [tuple(name for name in axis_names(entry) if op.mesh.shape[name] > 1) for entry in spec]
    for axes, what in ((used[2], "the tokens of a row (context or sequence parallelism)"), (used[3], "the head dim")):
        if axes:
            raise ValueError(
                f"attention={ATTENTION}: mesh axes {', '.join(axes)} split {what}, and the kernels need them whole; "
                f"set those axes to 1"
            )
    batch = used[0]
    if shape[0] % math.prod(op.mesh.shape[name] for name in batch):
        raise ValueError(
            f"attention={ATTENTION}: {shape[0]} rows do not divide over the mesh axes {', '.join(batch)}; change "
            f"per_device_batch_size"
        )
    return batch, used[1]


def _refuse(op, arguments: dict) -> None:
    """NotImplementedError, naming the feature, for what the kernels do not do. Nothing is ignored."""
    if not hasattr(op.config, "te_plugin_segment_capacity"):
        raise TypeError(
            f"attention={ATTENTION} needs te_plugin's configuration class: start with python -m "
            "te_plugin.maxtext.train, or "
            f"pass config_class=te_plugin.maxtext.TePluginConfig to pyconfig.initialize"
        )
    asked = [
        what
        for name, (nothing, what) in _UNSUPPORTED_ARGUMENTS.items()
        if arguments[name] is not nothing and not (isinstance(nothing, int) and arguments[name] == nothing)
    ]
    if arguments["model_mode"] != "train":
        asked.append(f"model_mode={arguments['model_mode']} (prefill and decoding)")
    if getattr(op.attention_type, "value", op.attention_type) != "global":
        asked.append(
            f"attention_type={getattr(op.attention_type, 'value', op.attention_type)} (sliding windows, chunks, MLA)"
        )
    if op.sliding_window_size:
        asked.append(f"a sliding window of {op.sliding_window_size}")
    if op.attn_logits_soft_cap:
        asked.append(f"attn_logits_soft_cap={op.attn_logits_soft_cap}")
    if op.dropout_rate > 0.0 and op.config.enable_dropout:
        asked.append(f"attention dropout of {op.dropout_rate}")
    if op.kv_quant is not None or not all(hasattr(arguments[name], "reshape") for name in ("key", "value")):
        asked.append("a quantised kv cache")
    if asked:
        raise NotImplementedError(
            f"attention={ATTENTION} does not support {'; '.join(asked)}. Use attention=dot_product, or leave that out"
        )
