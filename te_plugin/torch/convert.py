"""Swap the Linear and RMSNorm layers of any torch model for ours, keeping their parameters, and say what was left alone.

    report = convert(model, precision="fp8_current")
    print(report)
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field

import torch
from torch import nn

from te_plugin.ops.linear_checks import check_accumulation, check_features
from te_plugin.torch.modules import Linear, RMSNorm, make_state

OUTPUT_LAYERS = ("lm_head", "*.lm_head", "output_layer", "*.output_layer")


@dataclass
class ConvertReport:
    """What `convert` did. converted: (name, what it is now); skipped: (name, reason)."""

    precision: str
    converted: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"converted {len(self.converted)} layers to {self.precision}, left {len(self.skipped)} alone"]
        lines += [f"  {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


def convert(model: nn.Module, precision: str = "fp8_current", *, skip: tuple[str, ...] = OUTPUT_LAYERS, norms: bool = True,
            forward_accumulation: str = "fp32", kernel: str = "auto", fallback: str = "error",
            **state_options) -> ConvertReport:
    """Replace nn.Linear and RMSNorm modules of `model` in place; parameters are taken over, not copied.

    skip: glob patterns of module names to leave alone (the output layer by default: its inputs decide the loss directly).
    norms: also replace RMSNorm modules: torch's, and those of other libraries that hold `weight` and an eps and are named
    *RMSNorm. forward_accumulation, state_options: as in te_plugin.torch.Linear. Raises ValueError when nothing at all could be
    converted.
    """
    make_state(precision, state_options)  # refuses wrong options also where no Linear is found to take them
    check_accumulation(forward_accumulation, precision)
    report = ConvertReport(precision)
    shared = _shared_parameters(model)
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            full = f"{name}.{child_name}" if name else child_name
            made, reason = _replacement(full, child, precision, skip, norms, shared, forward_accumulation, kernel, fallback,
                                        state_options)
            if made is not None:
                setattr(module, child_name, made.train(child.training))
                report.converted.append((full, f"{type(made).__name__} {precision}"))
            elif reason:
                report.skipped.append((full, reason))
    if not report.converted:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in report.skipped) or " it holds no Linear and no RMSNorm"
        raise ValueError(f"convert(precision={precision!r}) found nothing to convert in {type(model).__name__}:{reasons}")
    return report


def _shared_parameters(model: nn.Module) -> set[int]:
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return {key for key, count in counts.items() if count > 1}


def _replacement(name, child, precision, skip, norms, shared, forward_accumulation, kernel, fallback, state_options):
    """(new module or None, reason for leaving a candidate alone or "")."""
    is_norm = norms and _is_rms_norm(child)
    if not (isinstance(child, nn.Linear) or is_norm) or isinstance(child, (Linear, RMSNorm)):
        return None, ""
    if any(fnmatch.fnmatch(name, pattern) for pattern in skip):
        return None, "its name is in skip"
    if type(child).forward is not nn.Linear.forward and isinstance(child, nn.Linear):
        return None, f"{type(child).__name__} overrides Linear.forward"
    if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks:
        return None, "it carries hooks, which a new module would lose"
    if is_norm:
        made = RMSNorm(child.weight.shape[0], _norm_eps(child), device="meta", kernel=kernel, fallback=fallback)
        made.weight = child.weight
        return made, ""
    if id(child.weight) in shared:
        return None, "its weight is shared with another module (tied embeddings)"
    try:
        check_features(child.in_features, child.out_features, precision)
    except ValueError as error:
        return None, str(error)
    made = Linear(child.in_features, child.out_features, child.bias is not None, precision=precision, device="meta",
                  forward_accumulation=forward_accumulation, kernel=kernel, fallback=fallback, **state_options)
    if made.state is not None:
        # Built on "meta" to allocate no weight; the few numbers of the FP8 state live where the weight lives.
        made.state = make_state(precision, state_options, child.weight.device)
    made.weight, made.bias = child.weight, child.bias
    return made, ""


def _is_rms_norm(module: nn.Module) -> bool:
    if isinstance(module, nn.RMSNorm):
        return module.weight is not None and len(module.normalized_shape) == 1
    weight = getattr(module, "weight", None)
    return (type(module).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and weight.dim() == 1
            and _norm_eps(module) is not None and getattr(module, "bias", None) is None)


def _norm_eps(module: nn.Module) -> float | None:
    for name in ("eps", "variance_epsilon", "norm_eps"):
        if isinstance(getattr(module, name, None), float):
            return getattr(module, name)
    return torch.finfo(torch.float32).eps if isinstance(module, nn.RMSNorm) else None
