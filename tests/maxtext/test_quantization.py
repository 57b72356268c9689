"""The module that MaxText calls in place of lax.dot_general."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin.maxtext.quantization import DotOptions, initial_state, make_quantization, next_state
from te_plugin.numerics import SCALINGS


def product(inputs, kernel, contracted=1, precision="bf16", axes=("embed", "mlp")):
    module = make_quantization(DotOptions(precision)).dot_general_cls(axes)()
    numbers = ((tuple(range(inputs.ndim - contracted, inputs.ndim)), tuple(range(contracted))), ((), ()))
    variables = module.init(jax.random.key(0), inputs, kernel, numbers)
    return module.apply(variables, inputs, kernel, numbers)


def test_bf16_products_are_summed_in_fp32_forward_and_backward(rng):
    """1024 rows of one sign: a BF16 sum stops growing long before the end."""
    x = jnp.asarray(1 + 0.1 * rng.standard_normal((1024, 64)), jnp.bfloat16)
    w = jnp.asarray(1 + 0.1 * rng.standard_normal((64, 32)), jnp.bfloat16)
    dy = jnp.ones((1024, 32), jnp.bfloat16)
    y, pull = jax.vjp(lambda x, w: product(x, w), x, w)
    _, dw = pull(dy)
    exact_x, exact_w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    for got, want in ((y, exact_x @ exact_w), (dw, exact_x.T @ np.asarray(dy, np.float64))):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8)


def test_two_dimensions_are_summed_over_as_the_output_projection_needs(rng):
    x, w = rng.standard_normal((2, 8, 4, 16)).astype(np.float32), rng.standard_normal((4, 16, 32)).astype(np.float32)
    got = product(jnp.asarray(x), jnp.asarray(w), contracted=2, axes=("heads", "kv", "embed"))
    np.testing.assert_allclose(got, np.einsum("bthd,hdn->btn", x, w), rtol=1e-4, atol=1e-5)


def test_the_router_of_a_mixture_is_never_quantised(rng):
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((16, 64), (64, 4)))
    np.testing.assert_allclose(product(x, w, precision="fp8_current", axes=("embed", None)), x @ w, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="out_features=4 .* 16"):
        product(x, w, precision="fp8_current", axes=("embed", "mlp"))


def test_delayed_scaling_moves_as_its_definition_says():
    """E4M3, window 4, max: amax 2, 8, 1, .5, .5, .5, .5 uses scale 1, 224, 56, 56, 56, 56, 448, next 896."""
    options, history, scale = DotOptions("fp8_delayed", history_len=4), jnp.zeros((3, 4)), jnp.ones(3)
    used = []
    for amax in (2, 8, 1, 0.5, 0.5, 0.5, 0.5):
        used.append(float(scale[0]))
        history, scale = next_state(history, scale, jnp.full(3, amax), options)
    assert [*used, float(scale[0])] == [1, 224, 56, 56, 56, 56, 448, 896]


def test_delayed_scaling_of_a_weight_starts_from_the_weight():
    _, scale = initial_state(jnp.asarray([[0.5, -2.0]]), SCALINGS["fp8_delayed"], 4)
    assert scale.tolist() == [1, 224, 1]
