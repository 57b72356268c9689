"""The loop's adapter for MaxText: one process, all its JAX devices, MaxText's model and shardings.

Data, schedule, rows, tracking and verdicts are the loop's own, so a run can be laid beside the same run on Megatron.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from te_plugin.config import Config, ConfigError
from te_plugin.training.adapter import Adapter
from te_plugin.training.distributed import World


def maxtext_adapter() -> Adapter:
    from te_plugin.data import build_data
    from te_plugin.jax import launches

    return Adapter(
        name="maxtext",
        build_data=build_data,
        initialize=_initialize,
        launches=launches.snapshot,
        reset_launches=launches.reset,
        make_engine=_make_engine,
    )


def _initialize(cfg: Config, world: World) -> World:
    if world.size > 1:
        raise ConfigError(
            f"adapter=maxtext with {world.size} processes: JAX drives every device of a machine from one "
            "process; start one "
            f"process, without --nproc or torchrun"
        )
    import jax

    if cfg.run.device != "auto":
        jax.config.update("jax_platforms", cfg.run.device)
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        raise ConfigError(
            f"run.device={cfg.run.device}: JAX finds no such device here ({error}); set run.device=cpu"
        ) from error
    if cfg.run.device == "cuda" and backend != "gpu":
        raise ConfigError("run.device=cuda: JAX runs on the CPU here; install its CUDA plugin, or set run.device=cpu")
    return world


def _make_engine(cfg: Config, run_dir: Path, adapter: Adapter, world: World, data: Any):
    from te_plugin.training.maxtext_engine import MaxTextEngine

    return MaxTextEngine(cfg, run_dir, data)
