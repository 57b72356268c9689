"""A Hugging Face llama folder: config.json and one or more .safetensors files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from te_plugin.config.schema import ConfigError, ModelConfig, RopeScalingConfig

_DTYPES = ("F64", "F32", "F16", "BF16")  # of safetensors; codes of 8 bits and fewer mean nothing without their scales
_COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # older folders hold what the header says


class HuggingFaceSource:
    """Weights of a llama by their common names, which are the folder's own."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} holds no config.json; a Hugging Face model folder has one")
        self.model = model_of(_read_json(folder / "config.json"), folder)
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
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():  # it says which files belong to the model: others may lie beside them
            return {name: self.folder / file for name, file in _read_json(index)["weight_map"].items()}
        files = {}
        for path in paths:
            with _readable(path), safe_open(str(path), framework="np") as handle:
                for name in handle.keys():  # noqa: SIM118 (no mapping)
                    if name in files:
                        raise ConfigError(f"{name} is in {files[name].name} and in {path.name} of {self.folder}: remove the file "
                                          f"that does not belong to the model")
                    files[name] = path
        return files

    def left_over(self, wanted) -> list[str]:
        """Weights that are not wanted and not made from others."""
        left = [name for name in self.files if name not in wanted and not _COMPUTED.fullmatch(name)]
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head in left and np.array_equal(self.read(head), self.read(embedding)):
            left.remove(head)  # tied, and stored twice
        return left

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> np.ndarray:
        """The weight in FP32."""
        import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16, in which most folders store)
        from safetensors import safe_open

        path = self.files[name]
        with _readable(path), safe_open(str(path), framework="np") as handle:
            dtype = handle.get_slice(name).get_dtype()
            if dtype not in _DTYPES:
                raise ConfigError(f"{name} of {path} is stored as {dtype}; quantised weights cannot be imported, take the "
                                  f"original model in BF16, FP16 or FP32")
            return handle.get_tensor(name).astype(np.float32)


@contextlib.contextmanager
def _readable(path: Path):
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


def model_of(config: dict, folder: Path) -> ModelConfig:
    """ModelConfig from a config.json. ConfigError for what this product's llama does not have."""
    kind = config.get("model_type")
    if kind != "llama":
        raise ConfigError(f"{folder / 'config.json'} says model_type={kind!r}; only llama can be imported")
    for key, allowed in (("attention_bias", (False, None)), ("mlp_bias", (False, None)), ("hidden_act", ("silu", None))):
        if config.get(key) not in allowed:
            raise ConfigError(f"{folder / 'config.json'}: {key}={config[key]!r} is not supported; supported: {allowed[0]!r}")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    for key, allowed in (("quantization_config", (None,)), ("compression_config", (None,)),
                         ("partial_rotary_factor", (None, 1, 1.0))):
        value = config.get(key, rope.get(key))
        if value not in allowed:
            raise ConfigError(f"{folder / 'config.json'}: {key}={value!r} is not supported; supported: {allowed[-1]!r}")
    config, rope = _Header(config, folder), _Header(rope, folder)
    heads = config["num_attention_heads"]
    return ModelConfig(
        name=folder.name, num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads, ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"], norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))), rope_scaling=_rope_scaling(rope, folder),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        init_std=float(config.get("initializer_range", 0.02)))


class _Header(dict):
    """config.json, or a part of it. A key that has to be there is one clear error where it is not."""

    def __init__(self, values: Mapping, folder: Path):
        super().__init__(values)
        self.folder = folder

    def __missing__(self, key: str):
        raise ConfigError(f"{self.folder / 'config.json'} does not say {key}; a llama needs it")


def _rope_scaling(rope: dict, folder: Path) -> RopeScalingConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScalingConfig()
    if kind != "llama3":
        raise ConfigError(f"{folder / 'config.json'}: rope scaling {kind!r} is not supported; supported: default, llama3")
    return RopeScalingConfig(float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
                             int(rope["original_max_position_embeddings"]))
