"""A Hugging Face llama folder: config.json and one or more .safetensors files."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import numpy as np

from te_plugin.config.schema import ConfigError, ModelConfig, RopeScalingConfig
from te_plugin.importing.header import Header

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
            files = Header(Header(_read_json(index), str(index)).get("weight_map"), f"{index}: weight_map").values
            wrong = next((file for file in files.values() if not isinstance(file, str) or file != Path(file).name), None)
            if wrong is not None:
                raise ConfigError(f"{index}: weight_map names {wrong!r}, which is no file of this folder")
            return {name: self.folder / file for name, file in files.items()}
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
    file = str(folder / "config.json")
    header = Header(config, file)
    kind = header.get("model_type")
    if kind != "llama":
        raise ConfigError(f"{file} says model_type={kind!r}; only llama can be imported")
    for key, allowed in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if header.get(key, allowed) != allowed:
            raise ConfigError(f"{file}: {key}={config[key]!r} is not supported; supported: {allowed!r}")
    name = "rope_parameters" if header.get("rope_parameters") else "rope_scaling"
    rope = Header(header.get(name, {}), f"{file}: {name}")
    for key, allowed in (("quantization_config", (None,)), ("compression_config", (None,)),
                         ("partial_rotary_factor", (None, 1, 1.0))):
        value = header.get(key, rope.get(key))
        if value not in allowed:
            raise ConfigError(f"{file}: {key}={value!r} is not supported; supported: {allowed[-1]!r}")
    heads, hidden = header.whole("num_attention_heads"), header.whole("hidden_size")
    return ModelConfig(
        name=folder.name, num_layers=header.whole("num_hidden_layers"), hidden_size=hidden, num_heads=heads,
        num_kv_heads=header.whole("num_key_value_heads", heads), head_dim=header.whole("head_dim", max(hidden // heads, 1)),
        ffn_hidden_size=header.whole("intermediate_size"), vocab_size=header.whole("vocab_size"),
        norm_eps=header.number("rms_norm_eps"), rope_theta=rope.number("rope_theta", header.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope), tie_embeddings=bool(header.get("tie_word_embeddings", False)),
        init_std=header.number("initializer_range", 0.02))


def _rope_scaling(rope: Header) -> RopeScalingConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        unread = [key for key in rope.values if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")]
        if unread:  # a factor without its type, or parameters for each kind of layer
            raise ConfigError(f"{rope.where} has {', '.join(unread)} and no rope_type that reads it; supported: default, llama3")
        return RopeScalingConfig()
    if kind != "llama3":
        raise ConfigError(f"{rope.where}: rope scaling {kind!r} is not supported; supported: default, llama3")
    return RopeScalingConfig(rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor"),
                             rope.whole("original_max_position_embeddings"))
