"""A batch on its device: the torch side of te_plugin.data.batch.

Legend: T tokens of all rows, N segments (capacity), B padded rows, S tokens of a padded row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class DeviceBatch:
    """Packed rows (THD). All tensors lie on one device; the integers are known on the host, so nothing synchronises.

    tokens, labels (-100: no loss), positions int64/int32[T]; cu_seqlens int32[N+1] real lengths, cu_seqlens_padded int32[N+1]
    start offsets (unused entries repeat the last value); padding bool[T] marks rows outside every segment, None when there
    are none; loss_tokens: rows with a label.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    padding: torch.Tensor | None
    rows: int
    loss_tokens: int


@dataclass(frozen=True)
class PaddedDeviceBatch:
    """One document a row, padded at its end (BSHD). tokens, labels [B,S]; lengths int32[B]; padding bool[B,S] or None."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    padding: torch.Tensor | None
    rows: int
    loss_tokens: int


def to_device(batch, device: torch.device | str) -> DeviceBatch | PaddedDeviceBatch:
    """A te_plugin.data Batch or PaddedBatch (NumPy) on a device; which of the two is told by its fields.

    ValueError when the lengths decrease, exceed their slots or the rows: caught here, on the host, once a batch.
    """
    if hasattr(batch, "cu_seqlens"):
        return _packed(batch, torch.device(device))
    return _padded(batch, torch.device(device))


def _packed(batch, device: torch.device) -> DeviceBatch:
    tokens = len(batch.tokens)
    lengths = np.diff(batch.cu_seqlens)
    starts = np.asarray(batch.cu_seqlens_padded)[:-1]
    slots = np.diff(batch.cu_seqlens_padded)
    if (lengths < 0).any() or (slots < 0).any():
        raise ValueError("cu_seqlens and cu_seqlens_padded must not decrease")
    if (lengths > slots).any() or (len(slots) and batch.cu_seqlens_padded[-1] > tokens):
        raise ValueError(f"cu_seqlens asks for more rows than cu_seqlens_padded or the {tokens} tokens hold")
    edges = np.zeros(tokens + 1, dtype=np.int32)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + lengths, -1)
    outside = np.cumsum(edges)[:-1] == 0
    return DeviceBatch(
        tokens=_send(batch.tokens.astype(np.int64), device), labels=_send(batch.labels.astype(np.int64), device),
        positions=_send(batch.positions, device), cu_seqlens=_send(batch.cu_seqlens, device),
        cu_seqlens_padded=_send(batch.cu_seqlens_padded, device),
        padding=_send(outside, device) if outside.any() else None, rows=batch.rows,
        loss_tokens=int((batch.labels >= 0).sum()))


def _padded(batch, device: torch.device) -> PaddedDeviceBatch:
    rows, width = batch.tokens.shape
    lengths = np.asarray(batch.lengths)
    if (lengths < 0).any() or (lengths > width).any():
        raise ValueError(f"lengths must lie in 0..{width}")
    outside = np.arange(width)[None, :] >= lengths[:, None]
    return PaddedDeviceBatch(
        tokens=_send(batch.tokens.astype(np.int64), device), labels=_send(batch.labels.astype(np.int64), device),
        positions=_send(batch.positions, device), lengths=_send(lengths.astype(np.int32), device),
        padding=_send(outside, device) if outside.any() else None, rows=rows, loss_tokens=int((batch.labels >= 0).sum()))


def _send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
