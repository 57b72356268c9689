"""MaxText's parameters from weights by their common names (te_plugin.weights), and back.

MaxText keeps kernels as [in..., out...], stacks the layers of a scanned model along `param_scan_axis`, and by its own convention
folds 1/sqrt(head_dim) into the query kernel. te_plugin's runs scale at run time instead (te_plugin_softmax_scale), so that the
optimizer sees the weights that Megatron sees; query_scale is for weights that go to or come from plain MaxText.
Under llama 3.1's scaled RoPE MaxText turns neighbouring pairs, where the common convention turns halves: q and k are reordered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

Source = Callable[[str], np.ndarray]
Path = tuple[str, ...]

_PLAIN = {
    ("token_embedder", "embedding"): ("model.embed_tokens.weight", False),
    ("decoder", "decoder_norm", "scale"): ("model.norm.weight", False),
    ("decoder", "logits_dense", "kernel"): ("lm_head.weight", True),
}
_NORMS = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
}
_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}
_MLP = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
_EXPERTS = {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}


class Layout:
    """How one model lays its parameters out. model: config.ModelConfig; interleaved: RoPE turns neighbouring pairs."""

    def __init__(
        self,
        model,
        num_experts: int = 0,
        *,
        interleaved: bool = False,
        scan_axis: int | None = 1,
        query_scale: float = 1.0,
    ):
        self.model, self.num_experts, self.scan_axis, self.query_scale = model, num_experts, scan_axis, query_scale
        self.order = _interleave(model.head_dim) if interleaved else None

    def to_maxtext(self, path: Path, source: Source) -> np.ndarray:
        """float32 value of the parameter at `path` from full weights [out, in] by common name. ValueError for an unknown path."""
        if path in _PLAIN:
            name, transposed = _PLAIN[path]
            return source(name).T if transposed else source(name)
        layer, part = _split(path)
        if layer is not None or self.scan_axis is None:
            return self._one(layer, part, source)
        layers = [self._one(number, part, source) for number in range(self.model.num_layers)]
        return np.stack(layers, axis=self.scan_axis)

    def to_common(self, path: Path, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """(common name, weight [out, in]) of a parameter."""
        if path in _PLAIN:
            name, transposed = _PLAIN[path]
            yield name, value.T if transposed else value
            return
        layer, part = _split(path)
        if layer is not None:
            yield from self._back(layer, part, value)
            return
        for number in range(self.model.num_layers):
            yield from self._back(number, part, np.take(value, number, axis=self.scan_axis))

    def _one(self, layer: int, part: Path, source: Source) -> np.ndarray:
        m, prefix = self.model, f"model.layers.{layer}."
        kind, name = _kind(part)
        if kind == "norm":
            return source(f"{prefix}{name}.weight")
        if kind == "mlp":
            return source(f"{prefix}mlp.{name}_proj.weight").T
        if kind == "gate":
            return source(f"{prefix}block_sparse_moe.gate.weight").T
        if kind == "experts":
            return np.stack(
                [source(f"{prefix}block_sparse_moe.experts.{e}.{name}.weight").T for e in range(self.num_experts)]
            )
        weight = source(f"{prefix}self_attn.{name}_proj.weight")
        if name == "o":
            return weight.T.reshape(m.num_heads, m.head_dim, m.hidden_size)
        heads = weight.reshape(-1, m.head_dim, m.hidden_size)
        if self.order is not None and name in "qk":
            heads = heads[:, self.order]
        kernel = heads.transpose(2, 0, 1)
        return kernel * np.float32(self.query_scale) if name == "q" and self.query_scale != 1.0 else kernel

    def _back(self, layer: int, part: Path, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        prefix = f"model.layers.{layer}."
        kind, name = _kind(part)
        if kind == "norm":
            yield f"{prefix}{name}.weight", value
        elif kind == "mlp":
            yield f"{prefix}mlp.{name}_proj.weight", value.T
        elif kind == "gate":
            yield f"{prefix}block_sparse_moe.gate.weight", value.T
        elif kind == "experts":
            for expert, matrix in enumerate(value):
                yield f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight", matrix.T
        elif name == "o":
            yield f"{prefix}self_attn.o_proj.weight", value.reshape(-1, value.shape[2]).T
        else:
            heads = value.transpose(1, 2, 0)
            if self.order is not None and name in "qk":
                heads = heads[:, np.argsort(self.order)]
            if name == "q" and self.query_scale != 1.0:
                heads = heads / np.float32(self.query_scale)
            yield f"{prefix}self_attn.{name}_proj.weight", heads.reshape(-1, heads.shape[2])


def _split(path: Path) -> tuple[int | None, Path]:
    """(layer number, path inside the layer); None for a scanned stack of all layers."""
    if len(path) > 2 and path[0] == "decoder":
        match = re.fullmatch(r"layers(?:_(\d+))?", path[1])
        if match:
            return (None if match[1] is None else int(match[1])), path[2:]
    raise ValueError(
        f"parameter {'/'.join(path)} has no common name: this is not a llama of MaxText's llama2 or mixtral decoder"
    )


def _kind(part: Path) -> tuple[str, str]:
    if len(part) == 2 and part[0] in _NORMS and part[1] == "scale":
        return "norm", _NORMS[part[0]]
    if len(part) == 3 and part[0] in ("self_attention", "attention") and part[1] in _ATTENTION and part[2] == "kernel":
        return "attention", _ATTENTION[part[1]]
    if len(part) == 3 and part[0] == "mlp" and part[1] in _MLP and part[2] == "kernel":
        return "mlp", _MLP[part[1]]
    if "gate" in part and part[-1] == "kernel":
        return "gate", "gate"
    if part[-1] in _EXPERTS and any("moe" in name.lower() or "MoeBlock" in name for name in part):
        return "experts", _EXPERTS[part[-1]]
    raise ValueError(
        f"parameter .../{'/'.join(part)} has no common name: this is not a llama of MaxText's llama2 or mixtral decoder"
    )


def _interleave(head_dim: int) -> np.ndarray:
    """Order in which the two halves of a head become neighbouring pairs: 0, D/2, 1, D/2 + 1, ..."""
    return np.arange(head_dim).reshape(2, -1).T.reshape(-1)
