"""The configuration of a run: schema, composition, rules and identity.

`schema` holds the dataclasses, configs/ the values; `compose()` turns command-line overrides into a Config, `load()` reads the
config.resolved.yaml that a launcher wrote, and both are equally strict. `validate()` holds every rule that spans two fields.
"""

from te_plugin.config.composition import compose, split_override
from te_plugin.config.identity import differences, recipe_hash
from te_plugin.config.loading import load, loads, to_yaml
from te_plugin.config.rules import target_arch, validate
from te_plugin.config.schema import (
    AcceptConfig,
    AdapterConfig,
    AttentionConfig,
    CheckConfig,
    Config,
    ConfigError,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RopeScalingConfig,
    RunConfig,
    ScheduleConfig,
    TestingConfig,
    TrackConfig,
)

__all__ = ["AcceptConfig", "AdapterConfig", "AttentionConfig", "CheckConfig", "Config", "ConfigError", "DataConfig",
           "LayoutConfig", "ModelConfig", "MoeConfig", "OptimConfig", "ParallelConfig", "PrecisionConfig", "RopeScalingConfig",
           "RunConfig", "ScheduleConfig", "TestingConfig", "TrackConfig", "compose", "differences", "load", "loads",
           "recipe_hash", "split_override", "target_arch", "to_yaml", "validate"]
