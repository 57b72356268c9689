"""The data package is light, and a missing optional library is an error that names the extra to install."""

import subprocess
import sys

import pytest

from te_plugin.data import DataError, cu_seqlens_from_positions, load_tokenizer, open_source

HEAVY = ("torch", "jax", "datasets", "transformers", "tokenizers", "tiktoken", "pyarrow", "omegaconf", "megatron")


def test_importing_the_data_package_imports_no_framework():
    code = f"import sys, te_plugin.data; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_named_with_its_extra(monkeypatch, tmp_path, hf_folder):
    folder = hf_folder()
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "tokenizer.model").write_text("")
    for name in ("pyarrow", "tokenizers", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"needs the package 'pyarrow'.*te_plugin\[data\]"):
        list(open_source("parquet", str(tmp_path)))
    with pytest.raises(DataError, match=r"needs the package 'tokenizers'.*te_plugin\[data\]"):
        load_tokenizer("hf", str(folder))
    with pytest.raises(DataError, match=r"needs the package 'tiktoken'.*te_plugin\[llama3\]"):
        load_tokenizer("llama3", str(tmp_path))


@pytest.mark.report("axolotl-ai-cloud/axolotl#1375")
def test_torch_tensors_are_read_like_arrays():
    torch = pytest.importorskip("torch")
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]], dtype=torch.int32)
    assert cu_seqlens_from_positions(positions).tolist() == [0, 3, 5, 7, 10]
