"""What the functions for JAX check of their arguments before anything is traced: ValueError, with what to give instead."""

from __future__ import annotations

import jax.numpy as jnp


def check_arrays(takes: str, **arrays) -> None:
    """Each has a shape and a dtype. takes: the call, with the shapes that it takes."""
    for name, x in arrays.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ValueError(f"{takes}; {name} is a {type(x).__name__}, not an array")


def check_integers(name: str, x) -> None:
    """An array holds integers: a cast would cut other numbers off without a word."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {x.dtype}")
