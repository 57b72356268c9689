"""The folder of imported weights: written once and atomically, read by name without loading what is not asked for."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np

from te_plugin.config.schema import ConfigError, ModelConfig, RopeScalingConfig
from te_plugin.weights import llama_weights

WEIGHTS = "weights.safetensors"
MODEL = "model.yaml"


def is_weights_folder(path: str | Path) -> bool:
    return (Path(path) / WEIGHTS).is_file() and (Path(path) / MODEL).is_file()


def import_weights(source: str | Path, out: str | Path, *, dtype: str = "bf16", progress=None) -> ModelConfig:
    """Read a Hugging Face llama folder or a .gguf file and write `out`; returns the model's sizes.

    dtype: bf16 or fp32, the type the weights are stored in. progress: called with (done, total, name).
    Raises ConfigError when the source is no llama this product can run, or lacks a weight; `out` is then not created.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another folder or remove it")
    if source.is_file() and source.suffix == ".gguf":
        from te_plugin.importing.gguf import GgufSource as Reader
    elif source.is_dir():
        from te_plugin.importing.huggingface import HuggingFaceSource as Reader
    else:
        raise ConfigError(f"{source} is neither a folder with config.json and *.safetensors nor a .gguf file")
    reader = Reader(source)
    wanted = llama_weights(reader.model)
    missing = [name for name in wanted if name not in reader]
    if missing:
        raise ConfigError(f"{source} lacks {len(missing)} of {len(wanted)} weights, the first is {missing[0]}; "
                          f"it is not the llama its header describes")
    left = reader.left_over(wanted)
    if left:
        raise ConfigError(f"{source} holds {len(left)} weights that a llama of its header does not have, the first is {left[0]}: "
                          f"without them it would be another model; only plain llamas can be imported")
    temporary = out.with_name(out.name + ".partial")
    if temporary.exists():
        raise ConfigError(f"{temporary} exists: an import was killed there, or runs now, or it is yours; remove it, or choose "
                          f"another folder than {out}")
    try:
        temporary.mkdir(parents=True)
        _write(reader, wanted, temporary, dtype, progress)
        os.replace(temporary, out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}; choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return reader.model


def _write(reader, wanted, folder: Path, dtype: str, progress) -> None:
    import ml_dtypes
    import yaml
    from safetensors.numpy import save_file

    numpy_dtype = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32}.get(dtype)
    if numpy_dtype is None:
        raise ConfigError(f"dtype={dtype!r} is not one of bf16, fp32")
    tensors = {}
    for done, (name, weight) in enumerate(wanted.items()):
        value = reader.read(name)
        if value.shape != weight.shape:
            raise ConfigError(f"{name} has shape {value.shape}; the header's sizes give {weight.shape}")
        tensors[name] = np.ascontiguousarray(value.astype(numpy_dtype))
        if not np.isfinite(tensors[name]).all():
            raise ConfigError(f"{name} holds values that are not finite in {dtype}; the source is damaged")
        if progress is not None:
            progress(done + 1, len(wanted), name)
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "te_plugin", "source": reader.describe()})
    (folder / MODEL).write_text(yaml.safe_dump(asdict(reader.model), sort_keys=False))


class ImportedWeights:
    """Reads a folder written by `import_weights`. model: ModelConfig; weights(name) -> torch tensor by its common name."""

    def __init__(self, path: str | Path):
        import yaml

        self.path = Path(path)
        if not is_weights_folder(self.path):
            raise ConfigError(f"{path} holds no {WEIGHTS} and {MODEL}; make it with te-plugin import-hf")
        try:
            values = yaml.safe_load((self.path / MODEL).read_text(encoding="utf-8"))
            self.model = ModelConfig(**{**values, "rope_scaling": RopeScalingConfig(**values["rope_scaling"])})
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path / MODEL} is not what te-plugin import-hf wrote ({error}); import the weights "
                              f"again") from error

    def check(self, model: ModelConfig) -> None:
        """ConfigError naming every size in which a run's model differs from these weights."""
        differing = [f"{key}: {getattr(model, key)} in the run, {value} in the weights"
                     for key, value in asdict(self.model).items()
                     if key not in ("name", "init_std") and _plain(getattr(model, key)) != value]
        if differing:
            raise ConfigError(f"run.init_from={self.path} does not fit the model: {'; '.join(differing)}. "
                              f"Take the values of {self.path / MODEL}")

    def torch_source(self):
        """name -> torch tensor, each read when asked for."""
        return self._source("pt")

    def numpy_source(self):
        """name -> float32 array, each read when asked for."""
        read = self._source("np")
        return lambda name: np.asarray(read(name), dtype=np.float32)

    def _source(self, framework: str):
        from safetensors import SafetensorError, safe_open

        path, handle = self.path / WEIGHTS, None

        def read(name: str):
            nonlocal handle
            try:
                handle = handle or safe_open(str(path), framework=framework)
                return handle.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read: {error}; import the weights again") from error

        return read


def _plain(value):
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
