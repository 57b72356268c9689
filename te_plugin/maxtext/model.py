"""A MaxText model that te_plugin trains: MaxText builds the model, its mesh and shardings; weights, optimizer step and evaluation
are functions here, so that a run equals the same run on Megatron.

Legend: A microbatches, B rows of a microbatch over all devices, T tokens a row.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from te_plugin import numerics
from te_plugin.config import ConfigError
from te_plugin.jax.quantize import scale_from_amax
from te_plugin.maxtext.rows import BATCH_KEYS, maxtext_rows
from te_plugin.maxtext.seams import install
from te_plugin.maxtext.segments import check_segments
from te_plugin.maxtext.settings import base_config, settings, uses_scaled_rope
from te_plugin.maxtext.train_step import maxtext_loss, optimizer, train_step
from te_plugin.maxtext.weights import Layout
from te_plugin.weights import initial_value, llama_weights


def initialize_config(cfg, devices: int, *, evaluation: bool = False, **overrides):
    """MaxText's HyperParameters of a run (config.Config). ConfigError with MaxText's own message where it refuses."""
    from maxtext.configs import pyconfig

    from te_plugin.maxtext.config import TePluginConfig

    keys = settings(cfg, devices, evaluation=evaluation) | overrides
    try:
        # initialize() ends the process on a bad value; this is what it does before that.
        with _quiet():
            return pyconfig.HyperParameters(
                pyconfig._initialize_pydantic(["te_plugin", base_config()], config_class=TePluginConfig, **keys)
            )
    except ValueError as error:
        raise ConfigError(f"adapter=maxtext: MaxText refuses this configuration: {error}") from error


@contextlib.contextmanager
def _quiet():
    """MaxText logs each of its hundreds of settings at INFO."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


class TrainedModel:
    """The model of a run on its devices, with the optimizer and the compiled step.

    overrides: keys of MaxText's configuration, over those of settings.py.
    state: nnx.State of MaxText's TrainStateNNX (model, optimizer), sharded as MaxText shards it.
    """

    def __init__(self, cfg, learning_rate: Callable[[Any], Any], devices: list | None = None, **overrides):
        from maxtext.common.train_state_nnx import TrainStateNNX
        from maxtext.utils import maxtext_utils, model_creation_utils, sharding

        install()
        self.cfg = cfg
        self.devices = jax.devices() if devices is None else devices
        self.config = initialize_config(cfg, len(self.devices), **overrides)
        jax.config.update("jax_use_shardy_partitioner", self.config.shardy)
        jax.config.update("jax_remove_size_one_mesh_axis_from_type", self.config.remove_size_one_mesh_axis_from_type)
        self.mesh = maxtext_utils.get_mesh_from_config(self.config, self.devices)
        self.layout = layout_of(cfg, self.config)
        tx = optimizer(cfg.optim, learning_rate)
        create, _ = model_creation_utils.create_nnx_abstract_model(self.config, self.mesh, self.devices)

        def create_state():
            model = create()
            return TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param))

        with self._axis_rules():
            _, _, self.shardings = maxtext_utils.get_abstract_state(self.config, self.mesh, create_state, True)
            self.graph = nnx.graphdef(nnx.eval_shape(create_state))
            self.state = jax.jit(lambda: nnx.state(create_state()), out_shardings=self.shardings)()
        self.batch_sharding = sharding.get_input_data_sharding(self.config, self.mesh)
        self._evaluation = self._compiled = None
        self._step = jax.jit(
            functools.partial(train_step, self.graph, self.config, cfg.optim.clip_grad),
            in_shardings=(self.shardings, _stacked(self.batch_sharding)),
            out_shardings=(self.shardings, None),
            donate_argnums=0,
        )

    @contextlib.contextmanager
    def _axis_rules(self):
        from flax.linen import logical_axis_rules

        with jax.set_mesh(self.mesh), logical_axis_rules(self.config.logical_axis_rules):
            yield

    # ---- weights ----

    def initialise(self) -> None:
        """The initial weights of the run: a pure function of cfg.run.seed and each weight's name."""
        known = llama_weights(self.cfg.model, self.cfg.moe.num_experts, self.cfg.moe.ffn_hidden_size)
        self.load_weights(lambda name: initial_value(known[name], self.cfg.run.seed))

    def load_weights(self, source: Callable[[str], np.ndarray]) -> None:
        """Set every parameter from full FP32 weights [out, in] by common name; delayed scaling starts from them."""
        pure = nnx.to_pure_dict(self.state)
        for path, value in parameters(pure["model"]):
            array = np.ascontiguousarray(self.layout.to_maxtext(path, source), dtype=np.float32)
            if array.shape != value.shape:
                raise ValueError(f"{'/'.join(path)} has shape {value.shape}, its weight gives {array.shape}")
            _set(pure["model"], path, jax.device_put(array.astype(value.dtype), value.sharding))
        _calibrate(pure["model"], self.layout.scan_axis)
        nnx.replace_by_pure_dict(self.state, pure)

    def common_weights(self) -> dict[str, np.ndarray]:
        """Full FP32 weights [out, in] by common name."""
        found = {}
        for path, value in parameters(nnx.to_pure_dict(self.state)["model"]):
            found.update(self.layout.to_common(path, np.asarray(value, dtype=np.float32)))
        return found

    # ---- checkpoints ----

    @property
    def updates_done(self) -> int:
        """Optimizer updates so far."""
        return int(nnx.to_pure_dict(self.state)["optimizer"]["step"])

    def checkpoint_tree(self) -> dict:
        """Everything a checkpoint holds: weights, moments, counts, FP8 state. (Nothing draws random numbers after the start.)"""
        return _without_rng(nnx.to_pure_dict(self.state))

    def load_checkpoint_tree(self, tree: dict) -> None:
        """Take over a tree of checkpoint_tree's structure."""
        pure = nnx.to_pure_dict(self.state)
        _overlay(pure, tree)
        nnx.replace_by_pure_dict(self.state, pure)

    # ---- training and evaluation ----

    def batch(self, batches: list) -> dict[str, jax.Array]:
        """A step's microbatches (data.Batch) as MaxText's arrays [A,B,T], on their devices. ValueError for too many segments."""
        rows = [maxtext_rows(batch) for batch in batches]
        expected = self.config.micro_batch_size_to_train_on
        for one in rows:
            if len(one["inputs"]) != expected:  # MaxText's loss would cut the batch and say nothing
                raise ValueError(f"a microbatch of {len(one['inputs'])} rows was given to a model built for {expected}")
            check_segments(one["inputs_segmentation"], self.config.te_plugin_segment_capacity)
        stacked = {key: np.stack([one[key] for one in rows]) for key in BATCH_KEYS}
        return jax.device_put(stacked, _stacked(self.batch_sharding))

    def step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """One optimizer step; loss, grad_norm, tokens, nonfinite. A step that is not finite changes nothing."""
        if self._compiled is None:
            self.compile(batch)
        self.state, numbers = self._compiled(self.state, batch)
        return numbers

    def compile(self, batch: dict[str, jax.Array]) -> None:
        """Compile the step for batches of this shape."""
        self._compiled = self.lowered(batch).compile()

    def lowered(self, batch: dict[str, jax.Array]):
        """The step lowered for a batch (for looking at what XLA makes of it)."""
        with self._axis_rules():
            return self._step.lower(self.state, batch)

    def loss_sum(self, batch) -> tuple[jax.Array, jax.Array]:
        """(summed loss in nats, label tokens) of one data.Batch, computed in BF16 for FP8 runs, touching no FP8 state."""
        if self._evaluation is None:
            self._evaluation = self._make_evaluation()
        return self._evaluation(self.batch([batch]))

    def _make_evaluation(self):
        from maxtext.utils import model_creation_utils

        config = initialize_config(self.cfg, len(self.devices), evaluation=True)
        create, _ = model_creation_utils.create_nnx_abstract_model(config, self.mesh, self.devices)
        with self._axis_rules():
            graph, params, rest = nnx.split(nnx.eval_shape(create), nnx.Param, ...)
            empty = jax.jit(lambda: nnx.split(create(), nnx.Param, ...)[2])()

        @jax.jit
        def losses(params, rest, batch):
            model = nnx.merge(graph, params, rest)
            _, aux = maxtext_loss()(model, config, dict(batch), None, None, is_train=False)
            return aux["xent_sum"], aux["total_weights"]

        def run(batch):
            model = nnx.to_pure_dict(self.state)["model"]
            values = jax.tree.map(lambda x: x, params)
            nnx.replace_by_pure_dict(values, _subset(model, nnx.to_pure_dict(params)))
            with self._axis_rules():
                return losses(values, empty, {key: value[0] for key, value in batch.items()})

        return run


def layout_of(cfg, config) -> Layout:
    """How a model of this configuration lays out its parameters."""
    return Layout(
        cfg.model,
        cfg.moe.num_experts,
        interleaved=uses_scaled_rope(cfg.model),
        scan_axis=config.param_scan_axis if config.scan_layers else None,
    )


def _stacked(sharding):
    """The sharding of [B,T] for [A,B,T]."""
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(None, *sharding.spec))


# ---- parameter trees ----


def parameters(model: dict) -> list[tuple[tuple[str, ...], jax.Array]]:
    """(path, array) of the parameters in a pure dict of a model's state; FP8 state and RNG state are left out."""
    found = []

    def walk(node, path):
        for key, value in node.items():
            inner = (*path, str(key))
            if isinstance(value, dict):
                if key not in ("rngs", "dropout") and not str(key).startswith("DotGeneral"):
                    walk(value, inner)
            else:
                found.append((inner, value))

    walk(model, ())
    return found


def _set(tree: dict, path: tuple[str, ...], value) -> None:
    *parents, name = path
    for parent in parents:
        tree = tree[parent]
    tree[name] = value


def _without_rng(tree: dict) -> dict:
    kept = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            inner = _without_rng(value)
            if inner and key not in ("rngs", "dropout"):
                kept[str(key)] = inner
        elif not jnp.issubdtype(value.dtype, jax.dtypes.extended):
            kept[str(key)] = value
    return kept


def _overlay(tree: dict, values: dict) -> None:
    """Put `values`, whose keys are strings, over the same places of `tree`."""
    for key, value in tree.items():
        if str(key) in values:
            if isinstance(value, dict):
                _overlay(value, values[str(key)])
            else:
                tree[key] = values[str(key)]


def _subset(tree: dict, like: dict) -> dict:
    return {key: _subset(tree[key], value) if isinstance(value, dict) else tree[key] for key, value in like.items()}


def _calibrate(model: dict, scan_axis: int | None) -> None:
    """Give delayed scaling the amax of each kernel: before the first step, and after weights were loaded.

    A scanned stack keeps its layers along scan_axis of a kernel and along the first dimension of FP8 state.
    """
    fmt = numerics.SCALINGS["fp8_delayed"].forward_format
    for parent, name in _delayed(model):
        state, kernel = parent[name], parent["kernel"]
        scale, history = np.array(state["scale"]), np.array(state["history"])
        over = tuple(axis for axis in range(kernel.ndim) if scale.ndim == 1 or axis != scan_axis)
        amax = np.asarray(jnp.max(jnp.abs(kernel.astype(jnp.float32)), axis=over))
        history[..., 1, :] = 0
        history[..., 1, min(1, history.shape[-1] - 1)] = amax
        scale[..., 1] = np.asarray(scale_from_amax(jnp.asarray(amax), fmt))
        state["scale"] = jax.device_put(scale, state["scale"].sharding)
        state["history"] = jax.device_put(history, state["history"].sharding)


def _delayed(node: dict):
    """(parent, key) of the FP8 state of every product with delayed scaling."""
    for key, value in list(node.items()):
        if isinstance(value, dict):
            if str(key).startswith("DotGeneral"):
                if "history" in value:
                    yield node, key
            else:
                yield from _delayed(value)
