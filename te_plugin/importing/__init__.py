"""Weights from elsewhere: a Hugging Face llama folder or a GGUF file becomes a folder that a recipe can start from.

The folder holds model.yaml (the sizes, as the `model` group takes them) and weights.safetensors under the common names of
te_plugin.weights, so every adapter can read it (`run.init_from=FOLDER`).
"""

from te_plugin.importing.folder import ImportedWeights, import_weights, is_weights_folder

__all__ = ["ImportedWeights", "import_weights", "is_weights_folder"]
