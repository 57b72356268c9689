"""Every test here needs maxtext and jax-tvm-ffi; none needs a GPU. The tests of a session share compiled programs."""

import pytest

pytest.importorskip("maxtext")
pytest.importorskip("jax_tvm_ffi")


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(tmp_path_factory):
    import jax

    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
