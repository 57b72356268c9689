# Everything from a fresh checkout: `make demo` trains llama_tiny in FP8 and checks its curve, `make test` runs the tests.
# Each target does its own set-up in .venv; needed beforehand: Python 3.12 or later, make and a C++ compiler.
#
#   make demo | test | test-slow | lint | wheel | cpu | sm90 | clean
#   make test-gpu PYTHON=python3     on a GPU machine, with the packages that PYTHON already has (no registry is asked)
#   make sanitize PYTHON=python3     there: our kernels under compute-sanitizer's memcheck and racecheck

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

# The interpreter that makes .venv, and that test-gpu and sm90 use as it is.
PYTHON ?= $(shell for p in python3.12 python3.13 python3 python; do \
  command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { command -v $$p; break; }; done)
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
EXTRAS := all,dev
CPU_LIBRARY := te_plugin/lib/libte_plugin_cpu.so
CPU_SOURCES := CMakeLists.txt $(wildcard cmake/*.cmake csrc/include/* csrc/cpu/*)
PYTEST_ARGS ?=

.PHONY: help demo test test-slow cpu test-gpu sanitize sm90 lint wheel clean python compiler

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n 1,6p

python:
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo "No Python 3.12 or later found (looked for python3.12, python3.13, python3, python). Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }

compiler:
	@command -v "$${CXX:-c++}" >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 || { \
	  echo "No C++ compiler found (looked for \$$CXX, c++, g++, clang++). Install one: apt-get install g++" >&2; exit 1; }

# ---- environment and library --------------------------------------------------------------------------------------------------

$(INSTALLED): pyproject.toml constraints.txt | python compiler
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module. Install it: apt-get install python3.12-venv" >&2; exit 1; }
	test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt -C wheel.cmake=false -e '.[$(EXTRAS)]'
	touch $@

# Built here and not by the editable install, so that a change of the sources rebuilds it and nothing is built twice.
$(CPU_LIBRARY): $(CPU_SOURCES) | $(INSTALLED)
	$(VENV)/bin/cmake -S . -B build/make -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) --log-level=WARNING
	$(VENV)/bin/cmake --build build/make
	touch $@

cpu: $(CPU_LIBRARY)

demo: $(CPU_LIBRARY)
	$(VENV)/bin/te-plugin train recipe=llama_tiny

test: $(CPU_LIBRARY)
	$(PY) -m pytest -m "not gpu and not multigpu and not slow" $(PYTEST_ARGS)

# Whole training runs and every cell of every toggle; minutes each.
test-slow: $(CPU_LIBRARY)
	$(PY) -m pytest -m "slow and not gpu and not multigpu" $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .

wheel: $(INSTALLED)
	$(PY) -m pip wheel -q --no-deps -w dist .
	@ls dist/*.whl

# ---- GPU: plain CMake with the given Python -----------------------------------------------------------------------------------

# cmake from the system or from PYTHON's own environment; Ninja where it exists.
CMAKE = $(shell command -v cmake 2>/dev/null || "$(PYTHON)" -c 'import cmake, os; print(os.path.join(cmake.CMAKE_BIN_DIR, "cmake"))' 2>/dev/null)
GENERATOR = $(shell command -v ninja >/dev/null 2>&1 && echo -G Ninja)

sm90: | python compiler
	@test -n "$(CMAKE)" || { echo "No cmake found. Install it: $(PYTHON) -m pip install cmake" >&2; exit 1; }
	"$(CMAKE)" -S . -B build/gpu $(GENERATOR) -DPython_EXECUTABLE="$$("$(PYTHON)" -c 'import sys; print(sys.executable)')" -DTE_PLUGIN_SM90=ON --log-level=WARNING
	"$(CMAKE)" --build build/gpu --parallel

# This folder before what PYTHON finds by itself and by its PYTHONPATH.
WITH_HERE = $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

test-gpu: sm90
	PYTHONPATH="$(WITH_HERE)" "$(PYTHON)" -m pytest -m "gpu or multigpu" $(PYTEST_ARGS)

# The small problems of every kernel; the others would take hours under a checker. Without torch's cache every tensor is an allocation
# of its own, so that an access outside it is seen; nothing can be captured into a graph then, nor profiled beside the checker.
# PYTEST_ARGS="-n 8" (pytest-xdist) checks in eight processes.
SANITIZER = $(shell command -v compute-sanitizer 2>/dev/null || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
TOOLS ?= memcheck racecheck
LARGE := several_tiles or long_sums or 128256 or 1104 or 2568 or of_many
CHECKED := tests/sm90 tests/ops/test_quantize_many.py
IMPOSSIBLE := graph or captured or launches

sanitize: sm90
	@test -n "$(SANITIZER)" || { echo "No compute-sanitizer found. It comes with the CUDA toolkit: install that, or put its bin folder on PATH" >&2; exit 1; }
	for tool in $(TOOLS); do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH="$(WITH_HERE)" "$(SANITIZER)" --tool $$tool --target-processes all --kernel-name kernel_substring=_ZN2te --error-exitcode 1 \
	    "$(PYTHON)" -m pytest $(CHECKED) -m gpu -k "not ($(LARGE) or $(IMPOSSIBLE))" $(PYTEST_ARGS) || exit 1; \
	done

clean:
	rm -rf build dist te_plugin/lib *.egg-info .pytest_cache .ruff_cache .hypothesis
	find te_plugin tests -name __pycache__ -type d -prune -exec rm -rf {} +
