"""Per-token losses of a GPTModel over a device batch, and the treatment of padding rows.

Padding rows (gaps between segments, the tail of a row) are set to zero before the first layer. RMSNorm, linear layers without
bias, SwiGLU and attention outside segments all map zero to zero, so these rows stay exactly zero through the model and back:
they reach no amax, no gradient and, by padding_mask, no router count.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from te_plugin.megatron.attention import PackedRows
from te_plugin.torch import functional
from te_plugin.torch.batch import DeviceBatch, PaddedDeviceBatch


def gpt_token_losses(model: torch.nn.Module, batch: DeviceBatch | PaddedDeviceBatch) -> torch.Tensor:
    """float32[T] per-token losses in nats, 0 where the label is -100. T: all tokens of the batch, rows concatenated.

    `model` is a GPTModel holding embedding and output layer, or a wrapper around one (DDP, FSDP2, torch.compile).
    """
    inputs = model_inputs(batch)
    losses = model(**inputs, output_processor=token_losses)
    return losses.reshape(-1)


def model_inputs(batch: DeviceBatch | PaddedDeviceBatch) -> dict:
    """The keyword arguments of GPTModel.forward for a batch; every pipeline stage of a microbatch needs the same ones."""
    if isinstance(batch, DeviceBatch):
        packed = PackedRows(
            qkv_format="thd", cu_seqlens_q=batch.cu_seqlens, cu_seqlens_kv=batch.cu_seqlens,
            cu_seqlens_q_padded=batch.cu_seqlens_padded, cu_seqlens_kv_padded=batch.cu_seqlens_padded, positions=batch.positions)
        return dict(input_ids=batch.tokens[None], position_ids=batch.positions[None], attention_mask=None,
                    labels=batch.labels[None], packed_seq_params=packed,
                    padding_mask=None if batch.padding is None else batch.padding[None])
    padding = batch.padding
    return dict(input_ids=batch.tokens, position_ids=batch.positions,
                attention_mask=None if padding is None else padding[:, None, None, :], labels=batch.labels,
                packed_seq_params=None, padding_mask=padding)


def token_losses(*, hidden_states, output_layer, output_weight, labels, runtime_gather_output, compute_language_model_loss,
                 scale_logits, config, **_) -> torch.Tensor:
    """GPTModel's output_processor: logits, then cross-entropy that ignores -100. labels[b,s] -> float32[b,s].

    Megatron's own cross-entropy gives a label of -100 a loss of log-sum-exp, which a plain mean would count.
    """
    logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
    logits = scale_logits(logits)
    if output_layer.tp_group.size() == 1:
        losses = functional.cross_entropy(logits, labels.transpose(0, 1)).transpose(0, 1)
    else:
        losses = compute_language_model_loss(labels.clamp(min=0), logits)
        losses = torch.where(labels >= 0, losses, 0.0).float()
    return _AuxLossScale.apply(losses) if config.num_moe_experts and config.moe_aux_loss_coeff else losses


class _AuxLossScale(torch.autograd.Function):
    """Gives the router's auxiliary loss the weight of the token losses, whatever they are divided by before backward.

    Megatron attaches that loss inside the layer, times the microbatch's tokens, with a global factor that its own schedule sets.
    The factor is the gradient of one token's loss, so it is read off here, where backward starts; nobody has to remember it.
    """

    @staticmethod
    def forward(ctx, losses):
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx, grad):
        MoEAuxLossAutoScaler.set_loss_scale(grad.max().detach().clone())
        return grad


def zero_padding_rows(decoder, args: tuple, kwargs: dict):
    """Forward pre-hook of the decoder: hidden states [s,b,H] of padding rows (padding_mask[b,s]) become zero.

    Under sequence parallelism Megatron has already cut padding_mask like the hidden states.
    """
    padding = kwargs.get("padding_mask")
    hidden = kwargs.get("hidden_states")
    if padding is None or hidden is None:
        return None
    mask = padding.transpose(0, 1).unsqueeze(-1)
    return args, {**kwargs, "hidden_states": hidden.masked_fill(mask, 0.0)}
