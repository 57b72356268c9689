"""FP8 through Megatron's quant_recipe: what a payload means, and the recipe of a configuration.

Megatron's own `config.fp8` does nothing without TransformerEngine: the model trains in BF16 and says nothing. So it is refused
here, and precision travels in `TransformerConfig.quant_recipe`: GPTModel matches module paths against its globs and calls
`finish_init(payload)` on every module that has it. A payload of this plugin is one key:

    configs:
      fp8: {te_plugin: {precision: fp8_current, weight_cache: per_step}}
      bf16: {te_plugin: {precision: bf16}}
    matchers:
      first_layer: {type: glob, enabled: true, pattern: "*layers.0.*", config: bf16}
      default: {type: glob, enabled: true, pattern: "*", config: fp8}
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from megatron.core.quantization.quant_config import GlobMatcher, QuantizationConfig, RecipeConfig

from te_plugin import numerics
from te_plugin.config import ConfigError
from te_plugin.ops.linear_checks import accumulation_reason
from te_plugin.plan import FALLBACK_MODES

AMAX_COMPUTE = ("max", "most_recent")
PAYLOAD_KEY = "te_plugin"
WEIGHT_CACHES = ("per_step", "none")


@dataclass(frozen=True)
class LinearPrecision:
    """What one linear layer computes in. The fields after precision matter for FP8 only (numerics.py, config.PrecisionConfig).

    main_grad: the weight gradient is added to weight.main_grad (FP32) in the backward pass, once per microbatch.
    kernel, fallback: which GEMM kernel, and what framework maths on a GPU means (plan.plan).
    """

    precision: str = "bf16"
    weight_cache: str = "per_step"
    keep_transpose: bool = True
    pow2_scale: bool = False
    amax_history_len: int = 1024
    amax_compute: str = "max"
    forward_accumulation: str = "fp32"
    main_grad: bool = False
    kernel: str = "auto"
    fallback: str = "error"

    def __post_init__(self):
        if self.precision not in numerics.PRECISIONS:
            raise ConfigError(f"precision {self.precision!r} is unknown; known: {', '.join(numerics.PRECISIONS)}")
        for name, known in (("weight_cache", WEIGHT_CACHES), ("amax_compute", AMAX_COMPUTE), ("fallback", FALLBACK_MODES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        for name in ("keep_transpose", "pow2_scale", "main_grad"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")
        if type(self.amax_history_len) is not int or self.amax_history_len < 1:
            raise ConfigError(f"amax_history_len={self.amax_history_len!r} must be a positive integer")
        if self.pow2_scale and not self.is_fp8:
            raise ConfigError(f"pow2_scale=true: precision {self.precision} has no scales; leave it out")
        if reason := accumulation_reason(self.forward_accumulation, self.precision):
            raise ConfigError(reason)

    @property
    def is_fp8(self) -> bool:
        return numerics.scaling(self.precision) is not None

    def check_features(self, where: str, in_features: int, out_features: int) -> None:
        """ConfigError when a weight of this shard's size cannot be computed in this precision; names the size at fault only."""
        kind = numerics.scaling(self.precision)
        if kind is None:
            return
        for name, size in (("input", in_features), ("output", out_features)):
            if size % kind.feature_multiple:
                raise ConfigError(
                    f"{where}: {self.precision} needs the {name} size to be a multiple of {kind.feature_multiple}, and this "
                    f"layer's is {size} (on one tensor-parallel rank). Change that size, or match this layer to a bf16 payload "
                    f"in quant_recipe")


def parse_payload(quant_config: QuantizationConfig | None, default: LinearPrecision) -> LinearPrecision:
    """The LinearPrecision of a matched payload; `default` when no matcher matched. ConfigError for anything it cannot obey."""
    if quant_config is None:
        return default
    payload = quant_config.config
    where = f"quant_recipe config {quant_config.config_key!r}"
    if not isinstance(payload, dict) or set(payload) != {PAYLOAD_KEY} or not isinstance(payload[PAYLOAD_KEY], dict):
        raise ConfigError(f"{where}: expected one key {PAYLOAD_KEY!r} holding a mapping, for example "
                          f"{{{PAYLOAD_KEY}: {{precision: fp8_current}}}}; got {payload!r}")
    fields = [field.name for field in dataclasses.fields(LinearPrecision)]
    for key in payload[PAYLOAD_KEY]:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            raise ConfigError(f"{where}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
                              + f" Known: {', '.join(fields)}")
    if "precision" not in payload[PAYLOAD_KEY]:
        raise ConfigError(f"{where}: no precision given; known: {', '.join(numerics.PRECISIONS)}")
    return LinearPrecision(**payload[PAYLOAD_KEY])


def quant_recipe(cfg, first_layer: int = 0, num_layers: int | None = None) -> RecipeConfig:
    """The recipe of a run's configuration (config.Config).

    The first `precision.bf16_layers_at_start` and the last `precision.bf16_layers_at_end` layers of the model are BF16. A
    pipeline stage names its layers from 0, so it passes the range it holds: first_layer, num_layers (default: all layers).
    """
    precision = cfg.precision
    total = cfg.model.num_layers
    held = total - first_layer if num_layers is None else num_layers
    settings = dict(precision=precision.name, weight_cache=precision.weight_cache, keep_transpose=precision.keep_transpose,
                    pow2_scale=precision.pow2_scale, amax_history_len=precision.amax_history_len,
                    amax_compute=precision.amax_compute, forward_accumulation=precision.forward_accumulation,
                    main_grad=cfg.parallel.grad_accum_fusion, fallback=cfg.run.fallback)
    high = "fp32" if precision.name == "fp32" else "bf16"
    plain = [layer for layer in range(first_layer, first_layer + held)
             if layer < precision.bf16_layers_at_start or layer >= total - precision.bf16_layers_at_end]
    matchers = [GlobMatcher(f"*decoder.layers.{layer - first_layer}.*", "high_precision") for layer in plain]
    return RecipeConfig(
        matchers=[*matchers, GlobMatcher("*", "default")],
        config_dict={"default": {PAYLOAD_KEY: settings},
                     "high_precision": {PAYLOAD_KEY: {**settings, "precision": high, "pow2_scale": False,
                                                                "forward_accumulation": "fp32"}}})


def precision_report(model) -> dict[str, str]:
    """Module path -> precision, for every linear of this plugin in a model."""
    return {name: module.precision.precision for name, module in model.named_modules()
            if isinstance(getattr(module, "precision", None), LinearPrecision)}
