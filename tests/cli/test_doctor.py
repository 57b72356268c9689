"""doctor: every backend against the oracle, and a machine without GPU, torch or any optional package."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from te_plugin import cli, ffi, selfcheck

ROOT = Path(cli.__file__).parents[1]
NEEDED = ("numpy", "numpy.libs", "tvm_ffi", "hydra", "omegaconf", "yaml", "antlr4", "rich", "pygments", "markdown_it", "mdurl",
          "packaging", "typing_extensions.py", "ml_dtypes", "_yaml", "matplotlib", "apache_tvm_ffi.libs")
DISTRIBUTIONS = ("numpy", "apache_tvm_ffi", "hydra_core", "omegaconf", "rich", "matplotlib", "pyyaml", "packaging")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment that has the required packages and nothing else."""
    import numpy

    installed, folder = Path(numpy.__file__).parents[1], tmp_path_factory.mktemp("bare")
    for path in installed.iterdir():
        distribution = path.name.partition("-")[0].lower()
        if path.name in NEEDED or (path.name.endswith(".dist-info") and distribution in DISTRIBUTIONS):
            (folder / path.name).symlink_to(path)

    def run(*argv: str):
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{folder}", "CUDA_VISIBLE_DEVICES": "",
                       "LD_LIBRARY_PATH": ""}
        return subprocess.run([sys.executable, "-S", *argv], env=environment, cwd=folder, capture_output=True, text=True,
                              timeout=120)

    return run


@pytest.mark.report("NVIDIA/TransformerEngine#1853")
def test_doctor_is_well_without_gpu_torch_or_any_optional_package(bare):
    done = bare("-m", "te_plugin", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "doctor: all is well" in done.stdout and "torch is not installed" in done.stdout
    assert all(check in done.stdout for check in ("attention, forward and backward", "quantise", "cross-entropy"))


@pytest.mark.report("NVIDIA/TransformerEngine#1853")
def test_the_package_imports_without_gpu_torch_or_any_optional_package(bare):
    done = bare("-c", "import te_plugin, sys; assert 'torch' not in sys.modules; print(te_plugin.plan("
                      "te_plugin.AttentionProblem(64, 64, 2, 2, 1, 64), 'cpu').kernel.name)")
    assert done.returncode == 0 and done.stdout.strip() == "cpu", done.stderr


def test_explain_and_cfg_work_without_torch(bare):
    for argv in (("explain", "recipe=llama_tiny", "run.device=cpu"), ("train", "recipe=llama_tiny", "--cfg", "job")):
        done = bare("-m", "te_plugin", *argv)
        assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_lists_versions_and_passes_here(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch cpu" in out and "cpu library" in out and "doctor: all is well" in out


def test_doctor_runs_for_a_user_without_a_home_directory(monkeypatch, capsys):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(selfcheck, "TORCH_CHECKS", {})
    monkeypatch.setattr(selfcheck, "JAX_CHECKS", {})
    assert cli.main(["doctor"]) == 0
    assert "none: Could not determine home directory" in " ".join(capsys.readouterr().out.split())


def test_doctor_exits_1_when_a_kernel_computes_something_else(monkeypatch, capsys):
    real = ffi.function

    def broken(library: str, name: str):
        function = real(library, name)
        if name != "swiglu_forward":
            return function

        def wrong(x, y):
            function(x, y)
            y[0, 0] += 1

        return wrong

    monkeypatch.setattr(ffi, "function", broken)
    monkeypatch.setattr(selfcheck, "TORCH_CHECKS", {})
    monkeypatch.setattr(selfcheck, "JAX_CHECKS", {})
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "cpu library, SwiGLU: relative error" in " ".join(out.split()) and "doctor: 1 problem" in out


def test_doctor_exits_1_when_the_library_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(ffi, "LIBRARY_DIR", tmp_path)
    monkeypatch.setattr(selfcheck, "TORCH_CHECKS", {})
    monkeypatch.setattr(selfcheck, "JAX_CHECKS", {})
    assert cli.main(["doctor"]) == 1
    assert "the cpu library is not at" in " ".join(capsys.readouterr().out.split())
