"""Core attention for Megatron's SelfAttention: packed rows (THD) and padded rows (SBHD), RoPE inside.

Legend: T tokens, H query heads, G kv heads, D head dim, s sequence, b batch, N segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.weak import WeakIdKeyDictionary

from te_plugin.config import ConfigError
from te_plugin.megatron.arguments import refuse_unknown
from te_plugin.megatron.refused import refuse_unsupported
from te_plugin.megatron.rope import RopeOptions, inverse_frequencies
from te_plugin.torch import functional
from te_plugin.torch.call import version_of

_MASKS = {AttnMaskType.causal: "causal", AttnMaskType.padding_causal: "causal", AttnMaskType.no_mask: "none",
          AttnMaskType.padding: "none"}


@dataclass
class PackedRows(PackedSeqParams):
    """PackedSeqParams that also carry `positions` int32[T] (restarting per segment), so that no layer has to compute them."""

    positions: torch.Tensor | None = field(default=None)


@dataclass(frozen=True)
class AttentionOptions:
    """What Megatron's config cannot say. layout: "thd" or "bshd" makes the other one an error, None takes both.

    rope None: positions are handled elsewhere (Megatron's rotary module). The rest: te_plugin.torch.functional.attention.
    """

    layout: str | None = None
    rope: RopeOptions | None = None
    window_left: int | None = None
    kernel: str = "auto"
    fallback: str = "error"
    precision: str = "bf16"
    dq_accumulation: str = "fp32"
    deterministic: bool = False

    def __post_init__(self):
        if self.layout not in (None, "thd", "bshd"):
            raise ConfigError(f"AttentionOptions.layout={self.layout!r} is not one of None, 'thd', 'bshd'")
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"AttentionOptions.deterministic={self.deterministic!r} must be True or False")

    @staticmethod
    def from_config(cfg) -> AttentionOptions:
        """From a run's config.Config."""
        attention = cfg.attention
        return AttentionOptions(layout=cfg.layout.name, rope=RopeOptions.from_model(cfg.model),
                                window_left=attention.window_left, kernel=attention.kernel, fallback=cfg.run.fallback,
                                precision=attention.precision, dq_accumulation=attention.dq_accumulation,
                                deterministic=attention.deterministic)


class CoreAttention(torch.nn.Module):
    """softmax(Q K^T) V per segment or row, with RoPE on Q and K when options.rope is set."""

    def __init__(self, *, config, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str = "self",
                 cp_comm_type: str | None = None, softmax_scale: float | None = None, pg_collection=None,
                 attention_dropout: float | None = None, k_channels: int | None = None, v_channels: int | None = None,
                 num_splits: int | None = None, options: AttentionOptions = AttentionOptions(), **unknown):
        super().__init__()
        refuse_unknown(type(self), {**unknown, "num_splits": num_splits})
        refuse_unsupported(config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse(config, attention_type, dropout, k_channels, v_channels)
        if options.rope is not None:
            _refuse_rotation(config)
        self.config = config
        self.layer_number = layer_number
        self.options = options
        self.mask = _mask_name(attn_mask_type)
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.window = _window(config, options)
        self.deterministic = options.deterministic or bool(getattr(config, "deterministic_mode", False))
        self._inv_freq: dict[torch.device, torch.Tensor] = {}

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None, /,
                *, attn_mask_type: AttnMaskType | None = None, attention_bias: torch.Tensor | None = None,
                packed_seq_params: PackedSeqParams | None = None) -> torch.Tensor:
        """q[T,H,D], k, v[T,G,D] with packed_seq_params -> [T, H*D]; q[s,b,H,D], k, v[s,b,G,D] without -> [s, b, H*D].

        attention_mask: None, or for padded rows a padding mask bool[b,1,1,s], True at the padding after a row's tokens. A dense
        [s,s] mask is refused: this attention is causal per segment by itself.
        """
        if attention_bias is not None:
            raise ValueError(f"core attention of layer {self.layer_number}: attention_bias is not supported; pass None")
        mask = self.mask if attn_mask_type is None else _mask_name(attn_mask_type)
        if packed_seq_params is not None:
            return self._packed(query, key, value, attention_mask, packed_seq_params, mask)
        if self.options.layout == "thd":
            raise ValueError(
                f"core attention of layer {self.layer_number} got no packed_seq_params and layout=thd: documents would see "
                f"each other. Every pipeline stage needs the packed_seq_params of its microbatch: pass them to the model")
        return self._padded(query, key, value, attention_mask, mask)

    def _packed(self, q, k, v, attention_mask, packed: PackedSeqParams, mask: str) -> torch.Tensor:
        if packed.qkv_format != "thd":
            raise ValueError(f"packed_seq_params.qkv_format={packed.qkv_format!r}: only 'thd' is packed")
        if self.options.layout == "bshd":
            raise ValueError(f"core attention of layer {self.layer_number} got packed_seq_params and layout=bshd; use layout=thd")
        if attention_mask is not None:
            raise ValueError("attention_mask is not used with packed_seq_params: cu_seqlens says what a token sees; pass None")
        if (packed.local_cp_size or 1) > 1:
            raise ValueError(f"packed_seq_params.local_cp_size={packed.local_cp_size}: context parallelism is not supported here")
        if q.dim() != 3:
            raise ValueError(f"a packed microbatch is one row, q[T,H,D], and the query is {list(q.shape)}; join its rows "
                             f"into one (tokens [1, b*T]) and shift the cu_seqlens of each by the tokens before it")
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"self-attention over packed rows needs as many keys as queries; got {k.shape[0]} and {q.shape[0]}")
        segments = _segments(packed)
        if self.options.rope is not None:
            at_q = at_k = getattr(packed, "positions", None)
            if at_q is None:
                at_q = functional.positions_of(segments["cu_seqlens_q"], q.shape[0], segments["cu_seqlens_q_padded"])
                at_k = at_q if "cu_seqlens_kv" not in segments else functional.positions_of(
                    segments["cu_seqlens_kv"], q.shape[0], segments["cu_seqlens_kv_padded"])
            q, k = self._rotate(q, at_q), self._rotate(k, at_k)
        out = self._attend(q, k, v, mask, **segments)
        return out.reshape(out.shape[0], -1)

    def _padded(self, q, k, v, attention_mask, mask: str) -> torch.Tensor:
        s, b, heads, head_dim = q.shape
        if k.shape[:2] != q.shape[:2]:
            raise ValueError(f"core attention of layer {self.layer_number} got {q.shape[0]} queries and {k.shape[0]} keys a row: "
                             f"decoding from a KV cache is not supported; run the whole row, without an inference_context")
        q, k, v = (x.transpose(0, 1).reshape(b * s, x.shape[2], head_dim) for x in (q, k, v))
        if self.options.rope is not None:
            positions = torch.arange(s, dtype=torch.int32, device=q.device).repeat(b)
            q, k = self._rotate(q, positions), self._rotate(k, positions)
        starts = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=q.device)
        lengths = _row_lengths(attention_mask, b, s)
        if lengths is None:
            out = self._attend(q, k, v, mask, cu_seqlens_q=starts)
        else:
            cu = torch.zeros_like(starts)
            torch.cumsum(lengths, 0, dtype=torch.int32, out=cu[1:])
            out = self._attend(q, k, v, mask, cu_seqlens_q=cu, cu_seqlens_q_padded=starts)
        return out.view(b, s, heads * head_dim).transpose(0, 1)

    def _attend(self, q, k, v, mask: str, **segments) -> torch.Tensor:
        options = self.options
        return functional.attention(q, k, v, mask=mask, window=self.window, softmax_scale=self.softmax_scale,
                                    precision=options.precision, dq_accumulation=options.dq_accumulation,
                                    deterministic=self.deterministic, kernel=options.kernel, fallback=options.fallback,
                                    **segments)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        inv_freq = self._inv_freq.get(x.device)
        if inv_freq is None:  # kept out of the buffers: a cast of the model to BF16 must not reach it
            inv_freq = torch.from_numpy(inverse_frequencies(x.shape[-1], self.options.rope)).to(x.device)
            self._inv_freq[x.device] = inv_freq
        return functional.rope(x, positions, inv_freq=inv_freq, fallback=self.options.fallback)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """No parameters, nothing to save."""
        return {}


def _segments(packed: PackedSeqParams) -> dict[str, torch.Tensor | None]:
    """The segment arguments of functional.attention: those of the keys too, unless they are the very tensors of the queries."""
    cu_q, start_q, cu_kv, start_kv = (packed.cu_seqlens_q, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv,
                                      packed.cu_seqlens_kv_padded)
    if cu_q is None:
        raise ValueError("packed_seq_params.cu_seqlens_q is None: it says where segments begin; set it and cu_seqlens_kv")
    cu_kv, start_kv = cu_q if cu_kv is None else cu_kv, start_q if start_kv is None else start_kv
    segments = {"cu_seqlens_q": _int32(cu_q), "cu_seqlens_q_padded": _int32(start_q)}
    if cu_kv is not cu_q or start_kv is not start_q:
        segments |= {"cu_seqlens_kv": _int32(cu_kv), "cu_seqlens_kv_padded": _int32(start_kv)}
    return segments


def _int32(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(torch.int32)


def _mask_name(attn_mask_type: AttnMaskType) -> str:
    if attn_mask_type not in _MASKS:
        raise ConfigError(f"attn_mask_type={attn_mask_type} is not supported; supported: {', '.join(m.name for m in _MASKS)}")
    return _MASKS[attn_mask_type]


def _row_lengths(attention_mask: torch.Tensor | None, b: int, s: int) -> torch.Tensor | None:
    """int32[b] from a padding mask bool[b,1,1,s] (True: padding, at the end of the row)."""
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) != (b, 1, 1, s) or attention_mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} {attention_mask.dtype}: this attention takes None or a padding mask "
            f"bool[{b}, 1, 1, {s}], not a dense mask (it is causal by itself). With Megatron-LM's loaders: "
            f"--no-create-attention-mask-in-dataloader")
    _require_padding_at_the_end(attention_mask)
    return (~attention_mask).sum(dim=(1, 2, 3), dtype=torch.int32)


_masks_read = WeakIdKeyDictionary()  # mask -> its version when it was read


def _require_padding_at_the_end(attention_mask: torch.Tensor) -> None:
    """ValueError for a row with a token after padding. Reads a mask once, not in every layer: on a GPU the host waits for it.

    Not during the capture of a CUDA graph, which allows no reading.
    """
    version = version_of(attention_mask)
    if _masks_read.get(attention_mask) == version:
        return
    if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if (attention_mask[..., :-1] & ~attention_mask[..., 1:]).any():
        raise ValueError(
            "attention_mask has a token after padding: this attention takes rows padded at their end, with True at the padding; "
            "move the padding to the end (padding_side='right'), or invert a mask that has True at the tokens")
    _masks_read[attention_mask] = version


def _window(config, options: AttentionOptions) -> tuple[int, int] | None:
    """(left, right) from options.window_left or config.window_size; both set and different is an error."""
    asked = getattr(config, "window_size", None)
    if isinstance(asked, int):
        raise ConfigError(f"config.window_size={asked} does not say which side; a causal window of W keys, the row's own "
                          f"included, is (W - 1, 0)")
    asked = None if asked is None else tuple(asked)
    own = None if options.window_left is None else (options.window_left, 0)
    if asked is not None and own is not None and asked != own:
        raise ConfigError(f"config.window_size={asked} and window_left={options.window_left} differ; set one of them")
    return own if own is not None else asked


def _refuse(config, attention_type: str, dropout: float, k_channels: int | None, v_channels: int | None) -> None:
    if attention_type != "self":
        raise ConfigError(f"attention_type={attention_type!r}: only self-attention is supported")
    if dropout:
        raise ConfigError(f"attention_dropout={dropout}: this attention has no dropout; set attention_dropout=0.0")
    if config.context_parallel_size > 1:
        raise ConfigError(f"context_parallel_size={config.context_parallel_size}: this core attention does not exchange keys "
                          f"between ranks; set it to 1")
    for name, channels in (("k_channels", k_channels), ("v_channels", v_channels)):
        if channels is not None and channels != config.kv_channels:
            raise ConfigError(f"{name}={channels} differs from kv_channels={config.kv_channels}: head sizes must be equal")
    unsupported = {
        "apply_query_key_layer_scaling": "scores are scaled by softmax_scale only",
        "qk_clip": "no score maximum is kept",
        "log_max_attention_logit": "no score maximum is kept",
        "window_attn_skip_freq": "a window holds for every layer or for none",
        "multi_latent_attention": "MLA needs another core attention",
        "no_rope_freq": "RoPE is applied in every layer or in none",
    }
    for name, why in unsupported.items():
        if getattr(config, name, None):
            raise ConfigError(f"config.{name}={getattr(config, name)!r} is not supported: {why}. Unset it")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        raise ConfigError(f"softmax_type={config.softmax_type!r} is not supported: use 'vanilla'")


def _refuse_rotation(config) -> None:
    """Rotations that Megatron's rotary module would do, and this one does not."""
    for name, why in (("rotary_interleaved", "pairs are (i, i + D/2)"), ("mrope_section", "a token has one position")):
        if getattr(config, name, None):
            raise ConfigError(f"config.{name}={getattr(config, name)!r} with RoPE inside core attention: {why}. Unset it, or "
                              f"leave AttentionOptions.rope out and positions to Megatron's rotary module")
