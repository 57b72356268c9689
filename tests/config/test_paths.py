"""configs/ and recipes/ are found in a source checkout and in an installed package, and a broken installation says so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from te_plugin import paths


def test_a_source_checkout_has_them_beside_the_package():
    assert (paths.configs_dir() / "recipe" / "llama_tiny.yaml").is_file()
    assert paths.recipes_dir().is_dir()


def test_an_installed_package_finds_its_own_configs_from_any_folder(tmp_path):
    """The layout of the wheel: configs inside the package, nothing beside it."""
    installed = tmp_path / "site"
    shutil.copytree(paths.PACKAGE_DIR, installed / "te_plugin", ignore=shutil.ignore_patterns("lib", "__pycache__", "corpus"))
    shutil.copytree(paths.configs_dir(), installed / "te_plugin" / "configs")
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run([sys.executable, "-m", "te_plugin", "train", "recipe=llama_tiny", "--cfg", "job"], capture_output=True,
                          text=True, cwd=tmp_path / "elsewhere", env={**os.environ, "PYTHONPATH": str(installed)}, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("recipe: llama_tiny"), done.stderr


def test_a_package_without_configs_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PACKAGE_DIR", Path(tmp_path / "te_plugin"))
    with pytest.raises(FileNotFoundError, match=r"neither at .*te_plugin/configs nor at .*/configs.*reinstall"):
        paths.configs_dir()
