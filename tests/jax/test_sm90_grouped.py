"""JAX's grouped BF16 products as planned for sm90, without a GPU: argument checks of csrc/sm90/gemm.cu, products by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin import oracle
from te_plugin.jax import grouped, grouped_linear
from te_plugin.plan import Target

SIZES = [5, 0, 20, 3]


@pytest.fixture
def stages(monkeypatch) -> list[str]:
    """Entry points in the order in which they are called."""
    called = []

    def launch(chosen, stage, outputs, inputs, scalars=()):
        called.append(stage)
        a, b, sizes = inputs
        p = chosen.problem
        member = jnp.repeat(jnp.arange(p.groups + 1), jnp.append(sizes, p.m - sizes.sum()), total_repeat_length=p.m)
        of_group = jax.nn.one_hot(member, p.groups)
        if stage == "wgrad":
            assert (a.shape, b.shape) == ((p.m, p.n), (p.m, p.k))
            return [jnp.einsum("me,mn,mk->enk", of_group, a, b)]
        assert a.shape == (p.m, p.k) and b.shape == (p.groups, *((p.n, p.k) if stage == "forward" else (p.k, p.n)))
        spelled = "me,mk,enk->mn" if stage == "forward" else "me,mk,ekn->mn"
        return [jnp.einsum(spelled, of_group, a, b).astype(outputs[0].dtype)]

    monkeypatch.setattr(grouped, "target_of_backend", lambda: Target("sm90", "jax"))
    monkeypatch.setattr(grouped, "launch", launch)
    return called


@pytest.mark.parametrize("layout,order", [("nk", ["forward", "dgrad", "wgrad"]), ("kn", ["dgrad", "forward", "wgrad"])])
def test_weights_are_read_as_they_lie(layout, order, stages, rng):
    x, w, dy = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((32, 16), (4, 24, 16), (32, 24)))
    stored = w if layout == "nk" else jnp.swapaxes(w, 1, 2)
    y, pull = jax.vjp(lambda x, w: grouped_linear(x, w, jnp.asarray(SIZES), layout=layout), x, stored)
    dx, dw = pull(dy)
    assert stages == order
    f64 = lambda array: np.asarray(array, np.float64)  # noqa: E731
    want_dx, want_dw = oracle.grouped_linear_backward(f64(dy), f64(x), f64(w), SIZES, "bf16")
    wanted = oracle.grouped_linear(f64(x), f64(w), SIZES, "bf16"), want_dx, want_dw
    for got, want in zip((y, dx, dw if layout == "nk" else jnp.swapaxes(dw, 1, 2)), wanted, strict=True):
        assert np.linalg.norm(f64(got) - want) <= 8e-3 * np.linalg.norm(want)
