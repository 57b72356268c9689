"""MaxText's own trainer with te_plugin installed: python -m te_plugin.maxtext.train CONFIG.yml key=value ...

Everything is MaxText's: configuration files, data, loop, checkpoints, metrics. Only the configuration class and the seams differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def initialize(argv: Sequence[str], **overrides):
    """MaxText's HyperParameters from its command line (argv[0] is the program) and overrides, with te_plugin installed."""
    import jax
    from maxtext.configs import pyconfig
    from maxtext.utils import train_utils

    from te_plugin.maxtext.config import TePluginConfig
    from te_plugin.maxtext.seams import install

    install()
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    config = pyconfig.initialize(list(argv), config_class=TePluginConfig, **overrides)
    train_utils.validate_train_config(config)
    jax.config.update("jax_use_shardy_partitioner", config.shardy)
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type)
    return config


def main(argv: Sequence[str] | None = None) -> None:
    """Train as MaxText's own command does."""
    argv = list(sys.argv if argv is None else argv)
    from maxtext.common.goodput import (
        RECORD_JOB_START_TIME,
        create_goodput_recorder,
        maybe_monitor_goodput,
        record_goodput,
    )
    from maxtext.trainers.pre_train import train

    config = initialize(argv)
    recorder = create_goodput_recorder(config)
    record_goodput(recorder, RECORD_JOB_START_TIME)
    with maybe_monitor_goodput(config):
        train.run(config, recorder)


if __name__ == "__main__":
    main()
