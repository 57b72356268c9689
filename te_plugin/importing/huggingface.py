"""A Hugging Face llama folder: config.json and one or more .safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from te_plugin.config.schema import ConfigError, ModelConfig, RopeScalingConfig


class HuggingFaceSource:
    """Weights of a llama by their common names, which are the folder's own."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} holds no config.json; a Hugging Face model folder has one")
        self.model = model_of(json.loads((folder / "config.json").read_text()), folder)
        self.files = self._index()

    def describe(self) -> str:
        return f"Hugging Face folder {self.folder.name}"

    def _index(self) -> dict[str, Path]:
        from safetensors import safe_open

        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            other = [p.name for p in self.folder.glob("*.bin")]
            hint = f"; {other[0]} is a pickle, save the model with safe_serialization=True" if other else ""
            raise ConfigError(f"{self.folder} holds no .safetensors file{hint}")
        files = {}
        for path in paths:
            with safe_open(str(path), framework="np") as handle:
                files.update(dict.fromkeys(handle.keys(), path))
        return files

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> np.ndarray:
        """The weight in FP32."""
        import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16, in which most folders store)
        from safetensors import safe_open

        with safe_open(str(self.files[name]), framework="np") as handle:
            return handle.get_tensor(name).astype(np.float32)


def model_of(config: dict, folder: Path) -> ModelConfig:
    """ModelConfig from a config.json. ConfigError for what this product's llama does not have."""
    kind = config.get("model_type")
    if kind != "llama":
        raise ConfigError(f"{folder / 'config.json'} says model_type={kind!r}; only llama can be imported")
    for key, allowed in (("attention_bias", (False, None)), ("mlp_bias", (False, None)), ("hidden_act", ("silu", None))):
        if config.get(key) not in allowed:
            raise ConfigError(f"{folder / 'config.json'}: {key}={config[key]!r} is not supported; supported: {allowed[0]!r}")
    heads = config["num_attention_heads"]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    return ModelConfig(
        name=folder.name, num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads, ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"], norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))), rope_scaling=_rope_scaling(rope, folder),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        init_std=float(config.get("initializer_range", 0.02)))


def _rope_scaling(rope: dict, folder: Path) -> RopeScalingConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScalingConfig()
    if kind != "llama3":
        raise ConfigError(f"{folder / 'config.json'}: rope scaling {kind!r} is not supported; supported: default, llama3")
    return RopeScalingConfig(float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
                             int(rope["original_max_position_embeddings"]))
