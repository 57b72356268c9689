"""run.tune=true: rank 0 measures the kernels of this run before its first step, and every rank takes rank 0's choices."""

from __future__ import annotations

from te_plugin.config import Config, ConfigError
from te_plugin.ops.recipe import problems_of
from te_plugin.plan import plan, set_tuner
from te_plugin.training.distributed import World


def start_tuning(cfg: Config, world: World) -> None:
    """Every rank calls it, after the adapter is initialised. Does nothing without run.tune. ConfigError on the CPU."""
    if not cfg.run.tune:
        return
    if world.device.type != "cuda":
        raise ConfigError("run.tune=true measures kernels on a GPU, and this run is on the CPU; leave run.tune out")
    from te_plugin.torch import tuning
    from te_plugin.torch.call import target_of

    tuner = tuning.enable()
    if world.is_main:
        for _, problem in problems_of(cfg):
            if problem.op == "gemm":
                plan(problem, target_of(world.device), fallback=cfg.run.fallback)
    tuner.adopt(world.broadcast_object(tuner.choices()), "not among the products that were measured before the first step")


def stop_tuning() -> None:
    """Back to the order of the kernels, for the next run of this process."""
    set_tuner(None)
