"""run.tune=true: rank 0 measures the kernels of this run before its first step, and every rank takes rank 0's choices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from te_plugin.config import Config, ConfigError
from te_plugin.ops.recipe import problems_of
from te_plugin.plan import plan, set_tuner
from te_plugin.training.distributed import World


@contextlib.contextmanager
def measured_kernels(cfg: Config, world: World) -> Iterator[None]:
    """Around a run, on every rank, after the adapter is initialised: with run.tune kernels are chosen by measurement, without it
    by their order, whatever the process did before. ConfigError for run.tune on the CPU."""
    if cfg.run.tune and world.device.type != "cuda":
        raise ConfigError("run.tune=true measures kernels on a GPU, and this run is on the CPU; leave run.tune out")
    before = set_tuner(None)
    try:
        if cfg.run.tune:
            _measure(cfg, world)
        yield
    finally:
        set_tuner(before)


def _measure(cfg: Config, world: World) -> None:
    from te_plugin.torch import tuning
    from te_plugin.torch.call import target_of

    tuner = tuning.enable()
    failure: str | None = None
    if world.is_main:
        try:
            for _, problem in problems_of(cfg):
                if problem.op == "gemm":
                    plan(problem, target_of(world.device), fallback=cfg.run.fallback)
        except Exception as error:  # the other ranks wait for an answer: this is it
            failure = f"run.tune=true: measuring the kernels failed: {error}"
    answer = world.broadcast_object(failure or tuner.choices())
    if isinstance(answer, str):
        raise ConfigError(answer)
    tuner.adopt(answer, "not among the products that were measured before the first step")
