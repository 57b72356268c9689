"""A GGUF file of a llama, quantised or not.

GGUF stores the rows of Q and K in the order of interleaved rotary pairs; this product rotates (i, i + D/2), so the rows are put
back. Tensors are dequantised by the `gguf` package.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from te_plugin.config.schema import ConfigError, ModelConfig
from te_plugin.importing.header import Header

_PLAIN = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
          "lm_head.weight": "output.weight"}
_LAYER = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
          "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


class GgufSource:
    """Weights of a llama by their common names."""

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError as error:
            raise ConfigError("reading .gguf needs the gguf package: pip install 'te_plugin[import-hf]'") from error
        self.path = path
        try:
            reader = gguf.GGUFReader(str(path))
        except Exception as error:  # it raises whatever the bytes lead to
            raise ConfigError(f"{path} cannot be read as GGUF: {error}") from error
        self.fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.model = self._model()

    def describe(self) -> str:
        return f"GGUF {self.path.name}"

    def _model(self) -> ModelConfig:
        architecture = self.fields.get("general.architecture")
        if architecture != "llama":
            raise ConfigError(f"{self.path} holds a {architecture!r} model; only llama can be imported")
        values = {name.removeprefix("llama."): value for name, value in self.fields.items()}
        header = Header(values, f"{self.path}, llama")
        if header.get("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in self.tensors:
            raise ConfigError(f"{self.path} scales its rotary frequencies; import the model's Hugging Face folder instead")
        heads, hidden = header.whole("attention.head_count"), header.whole("embedding_length")
        head_dim = header.whole("attention.key_length", max(hidden // heads, 1))
        if header.whole("rope.dimension_count", head_dim) != head_dim:
            raise ConfigError(f"{self.path} rotates {header.get('rope.dimension_count')} of {head_dim} elements of a head, which "
                              f"is not supported")
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ConfigError(f"{self.path} holds no matrix token_embd.weight; the first file of a split model alone is no model")
        return ModelConfig(
            name=self.path.stem, num_layers=header.whole("block_count"), hidden_size=hidden, num_heads=heads,
            num_kv_heads=header.whole("attention.head_count_kv", heads), head_dim=head_dim,
            ffn_hidden_size=header.whole("feed_forward_length"), vocab_size=int(embedding.shape[1]),
            norm_eps=_short(header.number("attention.layer_norm_rms_epsilon")),
            rope_theta=header.number("rope.freq_base", 10000.0), tie_embeddings="output.weight" not in self.tensors)

    def _own_name(self, name: str) -> str | None:
        if name in _PLAIN:
            return _PLAIN[name]
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        return f"blk.{match[1]}.{_LAYER[match[2]]}.weight" if match and match[2] in _LAYER else None

    def left_over(self, wanted) -> list[str]:
        """Weights that are not wanted."""
        return sorted(set(self.tensors) - {self._own_name(name) for name in wanted})

    def __contains__(self, name: str) -> bool:
        return self._own_name(name) in self.tensors

    def read(self, name: str) -> np.ndarray:
        """The weight in FP32, rows in this product's order."""
        import gguf

        tensor = self.tensors[self._own_name(name)]
        try:
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            raise ConfigError(f"{tensor.name} of {self.path} is stored as {tensor.tensor_type.name}, which the gguf package "
                              f"cannot read; take a file in another quantisation") from error
        if ".q_proj." in name:
            return pairs_to_halves(value, self.model.num_heads)
        if ".k_proj." in name:
            return pairs_to_halves(value, self.model.num_kv_heads)
        return value


def pairs_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [H*D, in] from interleaved rotary pairs (2i, 2i+1) to halves (i, i + D/2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _short(value: float) -> float:
    """An FP32 value as the shortest decimal that rounds to it: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
