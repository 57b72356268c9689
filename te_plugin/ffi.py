"""The only file that loads the compiled libraries (TVM FFI) and names the place where they lie.

A library is `te_plugin/lib/libte_plugin_<name>.so`. Its functions take tensor views (anything with DLPack: torch, NumPy) and
scalars, write into tensors the caller allocated, and raise ValueError for bad input.
"""

from __future__ import annotations

import functools
from pathlib import Path

LIBRARY_DIR = Path(__file__).parent / "lib"
LIBRARIES = ("cpu", "sm90")


class LibraryError(RuntimeError):
    """A compiled library is missing or does not load. The message says which, where it was looked for, and what to do."""


def library_path(name: str) -> Path:
    return LIBRARY_DIR / f"libte_plugin_{name}.so"


def is_built(name: str) -> bool:
    return library_path(name).is_file()


@functools.cache
def load(name: str):
    """The loaded module of a library ("cpu" or "sm90"). LibraryError when it is missing or broken."""
    path = library_path(name)
    if not path.is_file():
        how = "reinstall te_plugin" if name == "cpu" else "build it where nvcc is found: make sm90"
        raise LibraryError(f"library {name!r} is not built: {path} does not exist; {how}")
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))
    except Exception as error:  # the loader's own exception types differ between its releases
        found = f"apache-tvm-ffi {tvm_ffi.__version__}"
        raise LibraryError(f"library {name!r} at {path} does not load with {found}: {error}") from error


@functools.cache
def function(library: str, name: str):
    """An exported function as a Python callable (about 0.5 us a call)."""
    module = load(library)
    try:
        return module.get_function(name)
    except AttributeError as error:
        raise LibraryError(f"library {library!r} exports no function {name!r}; library and package differ: rebuild") from error


def exports(library: str, name: str) -> bool:
    """Whether a built library has a function; False where the library is absent."""
    if not is_built(library):
        return False
    try:
        function(library, name)
    except LibraryError:
        return False
    return True
