"""RMSNorm, SwiGLU and its gradient with FP8 output: the plan says whether one kernel does it or two.

The bytes are the same either way. These are casts of a layer (fast path: no shape checks, no autograd); the layers that use
them, with their backward, are in norm_linear.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_plugin.ops.activation_quantize.problem import ActivationQuantizeProblem
from te_plugin.ops.norm_quantize.problem import NormQuantizeProblem
from te_plugin.plan import Plan, plan, remember_unmeasured
from te_plugin.torch import launches
from te_plugin.torch.call import addressable, define, dtype_name, empty, is_direct, launch, target_of
from te_plugin.torch.options import options as options_of
from te_plugin.torch.pointwise import (
    PointwiseOptions,
    norm_forward_impl,
    norm_residual_forward_impl,
    swiglu_backward_impl,
    swiglu_forward_impl,
)
from te_plugin.torch.quantize import QuantizedTensor, QuantizeOptions, as_op, as_tensor, outputs_of, quantize_impl


@dataclass(frozen=True)
class FusedOptions(QuantizeOptions):
    """The non-tensor arguments: how the result is quantised, the choice of kernel, and RMSNorm's eps."""

    eps: float = 1e-5

    @property
    def cast(self) -> QuantizeOptions:
        return options_of(QuantizeOptions, self.format, self.granularity, self.pow2_scale, self.transpose, self.delayed)

    @property
    def op(self) -> PointwiseOptions:
        return options_of(PointwiseOptions, self.eps, False, "auto", self.fallback)


@remember_unmeasured
def _norm_plan(rows, columns, dtype, device, key) -> Plan:
    o = FusedOptions.from_key(key)
    problem = NormQuantizeProblem(o.problem(rows, columns, dtype), o.eps)
    return plan(problem, target_of(device), o.kernel, o.fallback)


@remember_unmeasured
def _activation_plan(rows, columns, gradient, dtype, device, key) -> Plan:
    o = FusedOptions.from_key(key)
    problem = ActivationQuantizeProblem(o.problem(rows, columns, dtype), gradient)
    return plan(problem, target_of(device), o.kernel, o.fallback)


def _fused(x: torch.Tensor) -> torch.Tensor:
    """x as the fused kernels read it."""
    return addressable(x.contiguous())


def _norm_quantize(x, residual, weight, scale, options: str):
    """data, scale_inv, data_t, scale_inv_t, stats, rstd and h = x + residual (None without a residual)."""
    o = FusedOptions.from_key(options)
    chosen = _norm_plan(x.shape[0], x.shape[1], dtype_name(x), x.device, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        if residual is None:
            h, (y, rstd) = None, norm_forward_impl(x, weight, o.op.key())
        else:
            y, h, rstd = norm_residual_forward_impl(x, residual, weight, o.op.key())
        return (*quantize_impl(y, scale, o.cast.key()), rstd, h)
    outputs = outputs_of(x.shape[0], x.shape[1], x.device, o.cast)
    rstd = empty((x.shape[0],), torch.float32, x.device)
    residual, h = (None, None) if residual is None else (_fused(residual), empty(x.shape, x.dtype, x.device))
    launch(chosen, "forward", _fused(x), residual, _fused(weight), h, rstd, scale, *outputs, o.eps, *chosen.attributes)
    return (*outputs, rstd, h)


def _swiglu_quantize(x, scale, options: str):
    o = FusedOptions.from_key(options)
    rows, columns = x.shape[0], x.shape[1] // 2
    chosen = _activation_plan(rows, columns, False, dtype_name(x), x.device, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "forward")
        return quantize_impl(swiglu_forward_impl(x, o.op.key()), scale, o.cast.key())
    outputs = outputs_of(rows, columns, x.device, o.cast)
    launch(chosen, "forward", _fused(x), scale, *outputs, *chosen.attributes)
    return outputs


def _dswiglu_quantize(dy, x, scale, options: str):
    o = FusedOptions.from_key(options)
    rows, width = x.shape
    chosen = _activation_plan(rows, width, True, dtype_name(x), x.device, options)
    if chosen.kernel.library is None:
        launches.record(chosen, "backward")
        return quantize_impl(swiglu_backward_impl(dy, x, o.op.key()), scale, o.cast.key())
    outputs = outputs_of(rows, width, x.device, o.cast)
    launch(chosen, "backward", _fused(dy), _fused(x), scale, *outputs, *chosen.attributes)
    return outputs


def _norm_op(x, residual, weight, scale, options: str):
    *made, rstd, h = _norm_quantize(x, residual, weight, scale, options)
    return *as_op(made), rstd, x.new_empty(0) if h is None else h


def _fake(rows, columns, x, options: str):
    return as_op(outputs_of(rows, columns, x.device, FusedOptions.from_key(options).cast))


_FIVE = "Tensor, Tensor, Tensor, Tensor, Tensor"
define(f"norm_quantize(Tensor x, Tensor? residual, Tensor weight, Tensor? scale, str options) -> ({_FIVE}, Tensor, Tensor)",
       _norm_op,
       lambda x, residual, weight, scale, options: (*_fake(x.shape[0], x.shape[1], x, options),
                                                    x.new_empty(x.shape[0], dtype=torch.float32),
                                                    x.new_empty(0) if residual is None else torch.empty_like(x)))
define(f"swiglu_quantize(Tensor x, Tensor? scale, str options) -> ({_FIVE})",
       lambda x, scale, options: as_op(_swiglu_quantize(x, scale, options)),
       lambda x, scale, options: _fake(x.shape[0], x.shape[1] // 2, x, options))
define(f"dswiglu_quantize(Tensor dy, Tensor x, Tensor? scale, str options) -> ({_FIVE})",
       lambda dy, x, scale, options: as_op(_dswiglu_quantize(dy, x, scale, options)),
       lambda dy, x, scale, options: _fake(x.shape[0], x.shape[1], x, options))


def fused_options(cast: QuantizeOptions, eps: float = 1e-5, kernel: str = "auto", fallback: str = "error") -> FusedOptions:
    """The options of a fused cast from those of the cast alone."""
    return options_of(FusedOptions, cast.format, cast.granularity, cast.pow2_scale, cast.transpose, cast.delayed, kernel,
                      fallback, eps)


def _result(made, o: FusedOptions) -> QuantizedTensor:
    return as_tensor(made, o.granularity, o.format, o.transpose)


def norm_quantize(x: torch.Tensor, weight: torch.Tensor, o: FusedOptions, scale: torch.Tensor | None = None,
                  residual: torch.Tensor | None = None) -> tuple[QuantizedTensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of h[R,C] in FP8, rstd[R] in FP32, and h: x, or x + residual[R,C] rounded to their dtype.

    scale: FP32[1], with o.delayed only.
    """
    if not is_direct(x):
        *made, rstd, h = torch.ops.te_plugin.norm_quantize(x, residual, weight, scale, o.key())
    else:
        *made, rstd, h = _norm_quantize(x, residual, weight, scale, o.key())
    return _result(made, o), rstd, x if residual is None else h


def swiglu_quantize(x: torch.Tensor, o: FusedOptions, scale: torch.Tensor | None = None) -> QuantizedTensor:
    """silu(gate) * up of x[R,2C] = [gate | up], [R,C] in FP8."""
    if not is_direct(x):
        return _result(torch.ops.te_plugin.swiglu_quantize(x, scale, o.key()), o)
    return _result(_swiglu_quantize(x, scale, o.key()), o)


def dswiglu_quantize(dy: torch.Tensor, x: torch.Tensor, o: FusedOptions, scale: torch.Tensor | None = None) -> QuantizedTensor:
    """The gradient of SwiGLU for x[R,2C] from dy[R,C], [R,2C] in FP8."""
    if not is_direct(x):
        return _result(torch.ops.te_plugin.dswiglu_quantize(dy, x, scale, o.key()), o)
    return _result(_dswiglu_quantize(dy, x, scale, o.key()), o)
