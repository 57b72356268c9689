"""One optimizer step on a MaxText model: MaxText's loss, te_plugin.training's rules for tokens, clipping and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import variablelib

from te_plugin.maxtext.quantization import STATE


def optimizer(optim, learning_rate: Callable[[Any], Any]) -> optax.GradientTransformation:
    """AdamW as te_plugin.training has it: decay on matrices only. learning_rate(updates done before) -> rate."""

    def matrices(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "scale" not in jax.tree_util.keystr(path), params)

    return optax.adamw(
        learning_rate, b1=optim.beta1, b2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay, mask=matrices
    )


def maxtext_loss():
    from maxtext.trainers.pre_train import train

    return train.loss_fn


def train_step(graph, config, clip: float, state: nnx.State, batch: dict[str, jax.Array]):
    """(next state, numbers): gradients of MaxText's loss summed over microbatches, clipped, one AdamW update.

    batch: arrays [A,B,T]. The loss is the mean over the label tokens of all microbatches. FP8 state gets the largest amax of the
    step; it moves on once a step, like the weights.
    """
    before = state
    train_state = nnx.merge(graph, state)
    state_type = variablelib.variable_type_from_name(STATE, allow_register=True)
    model_graph, params, fp8, rest = nnx.split(train_state.model, nnx.Param, state_type, ...)
    tokens = jnp.maximum(jnp.sum(batch["targets_segmentation"] != 0), 1)

    def loss_of(params, fp8, rest, micro):
        model = nnx.merge(model_graph, params, fp8, rest, copy=True)
        _, aux = maxtext_loss()(model, config, dict(micro), None, None, is_train=True)
        balance = aux["moe_lb_loss"] * aux["total_weights"]
        return (aux["xent_sum"] + balance) / tokens, aux["xent_sum"]

    gradient = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)

    def one(micro):
        (_, loss), (grads, new_fp8) = gradient(params, fp8, rest, micro)
        return loss, jax.tree.map(lambda g: g.astype(jnp.float32), grads), new_fp8

    count = batch["inputs"].shape[0]
    if count == 1:
        loss, grads, new_fp8 = one({key: value[0] for key, value in batch.items()})
    else:
        first = one({key: value[0] for key, value in batch.items()})

        def add(total, micro):
            loss, grads, new_fp8 = one(micro)
            return (total[0] + loss, jax.tree.map(jnp.add, total[1], grads), _combine(total[2], new_fp8)), None

        (loss, grads, new_fp8), _ = jax.lax.scan(add, first, {key: value[1:] for key, value in batch.items()})
    norm = optax.tree.norm(grads)
    if clip > 0:
        grads = jax.tree.map(lambda g: g * jnp.where(norm > clip, clip / (norm + 1e-6), 1.0), grads)
    nonfinite = _nonfinite(new_fp8)
    nnx.update(train_state.model, new_fp8)
    train_state.optimizer.update(train_state.model, grads)
    after = nnx.state(train_state, nnx.Not(nnx.Intermediate))
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    after = jax.tree.map(lambda new, old: jnp.where(finite, new, old) if _selectable(new) else new, after, before)
    return after, {"loss": loss / tokens, "grad_norm": norm, "tokens": tokens, "nonfinite": nonfinite}


def _selectable(x) -> bool:
    """Typed PRNG keys have no where; no op of these models draws from them."""
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _combine(total, new):
    """FP8 state of two microbatches of one step: the larger amax counts, non-finite values add up.

    Every microbatch starts from the same state, so its next history is that history with its own amaxes in; the element-wise
    maximum of two histories is the history with the larger amax in. A scale falls as amaxes grow, so the smaller one is kept.
    """

    def both(path, a, b):
        name = _leaf_name(path)
        if name == "stats":
            return jnp.concatenate([jnp.maximum(a[..., :1], b[..., :1]), a[..., 1:] + b[..., 1:]], axis=-1)
        return jnp.minimum(a, b) if name == "scale" else jnp.maximum(a, b)

    return jax.tree_util.tree_map_with_path(both, total, new)


def _leaf_name(path) -> str:
    names = [str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path]
    return next(name for name in reversed(names) if name in ("stats", "history", "scale"))


def _nonfinite(fp8) -> jax.Array:
    """Non-finite values that FP8 quantisation met in this step, over all layers."""
    total = jnp.zeros((), jnp.float32)
    for path, value in jax.tree_util.tree_leaves_with_path(fp8):
        if _leaf_name(path) == "stats":
            total += jnp.sum(value[..., 1])
    return total
