"""The experts of MaxText's mixture on te_plugin's grouped GEMM: in place of megablox where quantization=te_plugin_*.

MaxText calls mblx.gmm inside its own shard_map, on the arrays of one device.
"""

from __future__ import annotations

import inspect

import jax.numpy as jnp

from te_plugin.jax.grouped import grouped_linear
from te_plugin.maxtext.quantization import DotOptions

# Arguments that ask for what the grouped GEMM does not do, by the value that asks for nothing.
_UNSUPPORTED = {
    "existing_out": None,
    "transpose_rhs": False,
    "use_qwix_quantization": False,
    "use_tokamax_backend": False,
    "partial_sum": None,
}


def wrap_gmm(original, signature: inspect.Signature):
    """gmm that runs te_plugin's grouped GEMM where MaxText's quantisation object is te_plugin's."""

    def gmm(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        options = call["lhs_quantize_dtype"]
        if not isinstance(options, DotOptions):
            return original(*args, **kwargs)
        asked = [
            f"{name}={call[name]}"
            for name, nothing in _UNSUPPORTED.items()
            if call[name] is not nothing and call[name] != nothing
        ]
        if call["weight_gather_axes"]:
            asked.append(f"weight_gather_axes={call['weight_gather_axes']}")
        if asked:
            raise NotImplementedError(
                f"te_plugin's grouped GEMM does not support {', '.join(asked)}; leave that out, or set quantization=''"
            )
        y = grouped_rows(call["lhs"], call["rhs"], call["group_sizes"], call["group_offset"], options)
        return y.astype(call["preferred_element_type"])

    return gmm


def grouped_rows(lhs, rhs, group_sizes, group_offset, options: DotOptions):
    """y[M,N]: rows lhs[M,K], sorted by the groups of group_sizes[G'], times rhs[E,K,N] of groups offset .. offset + E - 1.

    Rows of other groups give 0 and get no gradient. group_offset: an integer, or an int32 scalar (or [1]) on the device.
    """
    experts = rhs.shape[0]
    if isinstance(group_offset, int) or group_offset is None:
        if not group_offset and group_sizes.shape[0] == experts:
            return _multiply(lhs, rhs, group_sizes, options)
        group_offset = group_offset or 0
    offset = jnp.asarray(group_offset, jnp.int32).reshape(())
    sizes = group_sizes.astype(jnp.int32)
    place = jnp.arange(sizes.shape[0])
    before = jnp.sum(jnp.where(place < offset, sizes, 0))
    own = jnp.roll(jnp.where((place >= offset) & (place < offset + experts), sizes, 0), -offset)[:experts]
    # The kernel wants its rows first: turn them to the front, and the result back.
    y = _multiply(jnp.roll(lhs, -before, axis=0), rhs, own, options)
    return jnp.roll(y, before, axis=0)


def _multiply(lhs, rhs, group_sizes, options: DotOptions):
    precision = options.precision if options.scaling is not None else "bf16"
    return grouped_linear(
        lhs, rhs, group_sizes, precision, layout="kn", pow2_scale=options.pow2_scale, fallback=options.fallback
    )
