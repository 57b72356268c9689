"""Arithmetic of a step, for perf/tflops_per_gpu and perf/mfu_bf16_peak."""

from __future__ import annotations

from te_plugin.config import Config

# Dense BF16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets (without sparsity).
_BF16_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12}


def flops_per_token(cfg: Config) -> float:
    """Model FLOPs a token, forward and backward (3 x forward, 2 FLOPs a multiply-add).

    Attention counts the causal half of a full row: packed documents are shorter, so the true number is lower. Recomputation
    and padding do not count.
    """
    m = cfg.model
    heads, groups = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    attention = m.hidden_size * (heads + 2 * groups) + heads * m.hidden_size
    if cfg.moe.num_experts:
        ffn = 3 * m.hidden_size * cfg.moe.ffn_hidden_size * cfg.moe.top_k + m.hidden_size * cfg.moe.num_experts
    else:
        ffn = 3 * m.hidden_size * m.ffn_hidden_size
    matmuls = m.num_layers * (attention + ffn) + m.hidden_size * m.vocab_size
    scores = m.num_layers * heads * cfg.data.seq_len  # QK^T and PV over half the row: 2 * (seq_len / 2) * heads
    return 6.0 * (matmuls + scores)


def peak_bf16_flops(gpu_name: str) -> float | None:
    """The data sheet's dense BF16 peak, None for a GPU that is not in the table."""
    return next((peak for name, peak in _BF16_PEAKS.items() if name in gpu_name), None)
