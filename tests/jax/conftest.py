"""Every test here needs JAX and jax-tvm-ffi; none needs a GPU."""

import pytest

pytest.importorskip("jax")
pytest.importorskip("jax_tvm_ffi")
