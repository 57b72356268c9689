"""Swap the Linear and RMSNorm layers of any torch model for ours, keeping their parameters, and say what was left alone.

    report = convert(model, precision="fp8_current")
    print(report)
"""

from __future__ import annotations

import copy
import fnmatch
import inspect
from dataclasses import dataclass, field

import torch
from torch import nn

from te_plugin import numerics
from te_plugin.ops.checks import check_flags
from te_plugin.ops.linear_checks import check_accumulation, check_features
from te_plugin.torch.call import DTYPE_NAME
from te_plugin.torch.functional import rms_norm
from te_plugin.torch.modules import Linear, RMSNorm, has_hooks, make_state

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

    skip: glob patterns of module names to leave alone with all that is in them (the output layer by default: its inputs decide
    the loss directly); one that matches no module is an error.
    norms: also replace RMSNorm modules: torch's, and those of other libraries that hold `weight` and an eps, are named *RMSNorm
    and compute what this one does (they are tried on a few numbers: Gemma's multiplies by 1 + weight). forward_accumulation,
    state_options: as in te_plugin.torch.Linear. Raises ValueError when nothing at all could be converted.
    """
    check_flags(norms=norms)
    make_state(precision, state_options)  # refuses wrong options also where no Linear is found to take them
    check_accumulation(forward_accumulation, precision)
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    _check_skip(model, skip)
    report = ConvertReport(precision)
    shared = _shared_parameters(model)
    replaced: dict[nn.Module, nn.Module] = {}  # a module in two places stays one module
    for name, module in list(model.named_modules()):
        for child_name, child in list(module._modules.items()):
            if child is None:
                continue
            full = f"{name}.{child_name}" if name else child_name
            made, reason = replaced.get(child), ""
            if made is None:
                made, reason = _replacement(full, child, precision, skip, norms, shared, forward_accumulation, kernel, fallback,
                                            state_options)
            if made is not None:
                replaced[child] = made.train(child.training)
                setattr(module, child_name, made)
                report.converted.append((full, f"{type(made).__name__} {precision}"))
            elif reason:
                report.skipped.append((full, reason))
    if not report.converted:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in report.skipped) or (
            " no module inside it is a Linear or an RMSNorm")
        raise ValueError(f"convert(precision={precision!r}) found nothing to convert in {type(model).__name__}:{reasons}")
    return report


def _check_skip(model: nn.Module, skip: tuple[str, ...]) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if pattern not in OUTPUT_LAYERS and not fnmatch.filter(names, pattern):
            raise ValueError(f"skip: {pattern!r} matches no module of {type(model).__name__}; names are such as "
                             f"{', '.join(names[1:4]) or 'none'}")


def _is_skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether a pattern matches a module or one that it is in."""
    parts = name.split(".")
    return any(fnmatch.fnmatch(".".join(parts[:end]), pattern) for pattern in skip for end in range(1, len(parts) + 1))


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
    if _is_skipped(name, skip):
        return None, "its name is in skip"
    reason = _own_ways(child)
    if reason:
        return None, reason
    if is_norm:
        reason = _norm_difference(child)
        if reason:
            return None, reason
        made = RMSNorm(child.weight.shape[0], _norm_eps(child), device="meta", kernel=kernel, fallback=fallback)
        made.weight = child.weight
        return made, ""
    if id(child.weight) in shared:
        return None, "its weight is shared with another module (tied embeddings)"
    if child.weight.dtype == torch.float64 and numerics.scaling(precision) is not None:
        return None, "its weight is torch.float64, which no FP8 kernel reads"
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


def _own_ways(child: nn.Module) -> str:
    """Why a new module would not do what this one does; "" where it would."""
    kind = type(child)
    if isinstance(child, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and never calls it"
    if kind.__call__ is not nn.Module.__call__:
        return f"{kind.__name__} overrides __call__"
    if "forward" in vars(child) or (isinstance(child, nn.Linear) and kind.forward is not nn.Linear.forward):
        return f"{kind.__name__} overrides forward"
    if "weight" not in child._parameters:
        return "its weight is no parameter but computed (weight_norm, a parametrization)"
    if has_hooks(child) or child._state_dict_hooks or child._load_state_dict_pre_hooks:
        return "it carries hooks, which a new module would lose"
    if more := [name for held in (child._parameters, child._buffers, child._modules) for name in held
                if name not in ("weight", "bias")]:
        return f"it holds {', '.join(more)} besides, which a new module would lose"
    if child.weight.dtype not in DTYPE_NAME:
        return f"its weight is {child.weight.dtype}: codes that mean nothing without their scales"
    return ""


def _norm_difference(norm: nn.Module) -> str:
    """Why a norm by that name is not this library's; "" where it is. A copy with a weight of its own is asked, on the CPU."""
    if len(inspect.signature(norm.forward).parameters) != 1:
        return f"{type(norm).__name__}.forward takes more than x"
    probe = copy.copy(norm)
    features = norm.weight.shape[0]
    numbers = torch.linspace(-2, 3, 2 * features, dtype=torch.float32, device="cpu")
    x, weight = numbers.view(2, features), numbers[:features].cos()
    probe._parameters = {**norm._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    try:
        same = torch.allclose(probe(x), rms_norm(x, weight, _norm_eps(norm)), rtol=1e-4, atol=1e-5)
    except Exception as error:  # code of any library
        return f"{type(norm).__name__} could not be compared with RMSNorm: {error}"
    return "" if same else f"{type(norm).__name__} computes something else than x * rsqrt(mean(x^2) + eps) * weight"


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
