"""FP8 products of MaxText's dense layers: `quantization=te_plugin_*`.

MaxText asks its quantisation object for a Linen module in place of lax.dot_general and calls it with (inputs, kernel,
dimension numbers). Kernels lie as [in features..., out features...]. State lives in the collection `_overwrite_with_gradient`,
whose variables MaxText's train step overwrites with their gradient: the backward pass returns the next state there.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from te_plugin import numerics
from te_plugin.jax.linear import linear
from te_plugin.jax.quantize import scale_from_amax
from te_plugin.maxtext.names import precision_of

STATE = "_overwrite_with_gradient"


@dataclass(frozen=True)
class DotOptions:
    """The static arguments of the products of a run."""

    precision: str
    pow2_scale: bool = False
    history_len: int = 1024
    amax_compute: str = "max"
    fallback: str = "error"

    @property
    def scaling(self) -> numerics.Scaling | None:
        return numerics.scaling(self.precision)


def wrap_configure(original, signature: inspect.Signature):
    """configure_quantization that answers for te_plugin's names."""

    def configure_quantization(config, quant_mode_str="train"):
        precision = precision_of(config.quantization)
        if precision is None:
            return original(config, quant_mode_str)
        if quant_mode_str != "train":
            raise NotImplementedError(
                f"quantization={config.quantization}: te_plugin quantises for training; "
                f"{quant_mode_str} is not supported"
            )
        return make_quantization(
            DotOptions(
                precision,
                config.te_plugin_pow2_scale,
                config.te_plugin_amax_history_len,
                config.te_plugin_amax_compute,
                config.te_plugin_fallback,
            )
        )

    return configure_quantization


def make_quantization(options: DotOptions):
    """MaxText's Quantization object for these options."""
    from maxtext.layers import quantizations

    class TePluginQuantization(quantizations.Quantization):
        """Two of the same options are equal: models built twice from one configuration are one to jit."""

        needs_apply_rngs = False
        quant_mode = "train"

        def __init__(self, options: DotOptions):
            self.options = options

        @property
        def quantize_dtype(self) -> DotOptions:
            """MaxText hands this to its grouped GEMM as the dtype to quantise to: by it our wrapper knows the call is ours."""
            return self.options

        def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()):
            # A kernel with a named input and an unnamed output is the router of a mixture: it is never quantised.
            router = len(mesh_axes) == 2 and mesh_axes[0] is not None and mesh_axes[1] is None
            return functools.partial(DotGeneral, options=replace(self.options, precision="bf16") if router else self.options)

        def einsum(self, dtype=jnp.float32):
            raise NotImplementedError(
                "quantization=te_plugin_* has no einsum: dense mixtures of experts "
                "(sparse_matmul=false) and "
                "quantised attention products are not supported"
            )

        def __eq__(self, other) -> bool:
            return type(self).__name__ == type(other).__name__ and self.options == other.options

        def __hash__(self) -> int:
            return hash((type(self).__name__, self.options))

    return TePluginQuantization(options)


class DotGeneral(nn.Module):
    """lax.dot_general in a te_plugin precision: inputs[..., in features] by kernel[in features, out features]."""

    options: DotOptions

    @nn.compact
    def __call__(self, inputs, kernel, dimension_numbers, precision=None, **kwargs):
        if kwargs.get("preferred_element_type") not in (None, inputs.dtype):
            raise NotImplementedError(
                f"te_plugin's product returns {inputs.dtype}, not {kwargs['preferred_element_type']}"
            )
        o, kind = self.options, self.options.scaling
        contracted = _contracted(inputs.shape, kernel.shape, dimension_numbers)
        k = math.prod(kernel.shape[:contracted])
        matrix = kernel.reshape(k, -1)
        rows = inputs.reshape(*inputs.shape[: inputs.ndim - contracted], k)
        out_shape = (*inputs.shape[: inputs.ndim - contracted], *kernel.shape[contracted:])
        if kind is None:
            # Not lax.dot_general: on the CPU XLA would sum BF16 products in less than FP32.
            return linear(rows, matrix, precision="bf16", layout="kn", fallback=o.fallback).reshape(out_shape)
        stats = self.variable(STATE, "stats", jnp.zeros, (3, 2), jnp.float32)
        scales = None
        if kind.delayed:
            start = functools.partial(initial_state, matrix, kind, o.history_len)
            history = self.variable(STATE, "history", lambda: start()[0])
            scale = self.variable(STATE, "scale", lambda: start()[1])
            scales = delayed_scales(history.value, scale.value, o)
        if self.is_initializing():
            return jnp.zeros(out_shape, inputs.dtype)
        y = linear(
            rows, matrix, precision=o.precision, layout="kn", scales=scales, stats=stats.value, pow2_scale=o.pow2_scale,
            fallback=o.fallback,
        )  # fmt: skip
        return y.reshape(out_shape)


def _contracted(inputs: tuple[int, ...], kernel: tuple[int, ...], dimension_numbers) -> int:
    """How many dimensions are summed over. Only the last ones of inputs by the first ones of kernel, in order."""
    (left, right), (batch_left, batch_right) = dimension_numbers
    count = len(left)
    left = tuple(axis % len(inputs) for axis in left)
    if (
        batch_left
        or batch_right
        or tuple(right) != tuple(range(count))
        or left != tuple(range(len(inputs) - count, len(inputs)))
    ):
        raise NotImplementedError(
            f"te_plugin multiplies the last dimensions of the inputs by the first of the kernel; asked for "
            f"{dimension_numbers} on {inputs} and {kernel}"
        )
    return count


# ---- delayed scaling ----


def initial_state(kernel, kind: numerics.Scaling, history_len: int):
    """(history[3,L], scale[3]) before the first step: the weight's scale comes from the weight, which is there already."""
    amax = jnp.max(jnp.abs(kernel.astype(jnp.float32)))
    history = jnp.zeros((3, history_len), jnp.float32).at[1, min(1, history_len - 1)].set(amax)
    return history, jnp.ones(3, jnp.float32).at[1].set(scale_from_amax(amax, kind.forward_format))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def delayed_scales(history, scale, options: DotOptions):
    """The scales of this step. Its backward turns the amaxes of the step into the next history and scales."""
    return scale


def _delayed_backward(options: DotOptions, saved, amaxes):
    return next_state(*saved, amaxes, options)


delayed_scales.defvjp(lambda history, scale, options: (scale, (history, scale)), _delayed_backward)


def next_state(history, scale, amaxes, options: DotOptions):
    """(history[3,L], scale[3]) after a step with these amaxes[3]; the rules of te_plugin.torch.state.DelayedScaling.advance."""
    kind = options.scaling
    history = history.at[:, 0].set(jnp.maximum(history[:, 0], amaxes))
    amax = jnp.max(history, axis=1) if options.amax_compute == "max" else history[:, 0]
    amax = jnp.where(jnp.isnan(history[:, 0]), 0.0, amax)
    formats = (kind.forward_format, kind.forward_format, kind.gradient_format)
    proposed = jnp.stack([scale_from_amax(amax[i], formats[i]) for i in range(3)])
    usable = (amax > 0) & jnp.isfinite(amax)
    newest = jnp.where(jnp.isfinite(history[:, :1]), history[:, :1], 0.0)
    rolled = jnp.concatenate([jnp.zeros_like(newest), newest, history[:, 1:-1]], axis=1)[:, : history.shape[1]]
    return rolled, jnp.where(usable, proposed, scale)
