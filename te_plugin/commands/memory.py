"""An estimate of a run's memory from its configuration: what is kept, not what the allocator adds.

Legend: h hidden size, H heads, G kv heads, D head dim, f ffn width, V vocabulary, L layers, T tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from te_plugin import numerics
from te_plugin.config import Config
from te_plugin.config.sizes import parameter_count
from te_plugin.plan import Plan


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process. fp8_weights: the quantised copies that weight_cache=per_step keeps. scratch: of the launch that needs
    most; launches follow each other.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    fp8_weights: int
    activations: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.fp8_weights + self.activations + self.scratch


def estimate(cfg: Config, plans: Iterable[Plan], processes: int = 1) -> MemoryEstimate:
    """Memory of one process from the plans of its launches; with parallel=fsdp2 weights, gradients and optimizer state are shared
    by `processes`."""
    total, linear = parameter_count(cfg)
    shards = processes if cfg.parallel.name == "fsdp2" else 1
    fp8 = numerics.scaling(cfg.precision.name) is not None
    value = 4 if cfg.precision.name == "fp32" else 2
    master = 0 if cfg.precision.name == "fp32" else 4  # FP32 parameters are their own master copy
    copies = 2 if cfg.precision.keep_transpose else 1
    cached = linear * copies if fp8 and cfg.precision.weight_cache == "per_step" else 0
    return MemoryEstimate(parameters=total, weights=total * value // shards, gradients=total * 4 // shards,
                          optimizer=total * (master + 8) // shards, fp8_weights=cached, activations=_activations(cfg, value, fp8),
                          scratch=max((made.scratch_bytes for made in plans), default=0))


def _activations(cfg: Config, value: int, fp8: bool) -> int:
    """What backward needs of the forward pass, with no recompute. Inputs of FP8 linears are kept as one byte a value."""
    m, moe = cfg.model, cfg.moe
    tokens = cfg.schedule.micro_rows * cfg.data.seq_len
    kept_input = 1 if fp8 else value
    query = m.num_heads * m.head_dim
    qkv = query + 2 * m.num_kv_heads * m.head_dim
    ffn = moe.top_k * moe.ffn_hidden_size if moe.num_experts else m.ffn_hidden_size
    layer = (2 * m.hidden_size * value            # inputs of both norms
             + 2 * m.hidden_size * kept_input     # inputs of the qkv and of the gate/up projection
             + (qkv + query) * value + 4 * m.num_heads   # q, k, v, attention output, log-sum-exp
             + query * kept_input                 # input of the output projection
             + 2 * ffn * value + ffn * kept_input)  # gate and up; input of the down projection
    logits = m.vocab_size * (value + 4)
    return tokens * (m.num_layers * layer + logits)
