"""Quantisation for torch: a tensor, its FP8 copies and their scales."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from te_plugin import numerics
from te_plugin.ops.quantize.problem import QuantizeProblem, scale_shape
from te_plugin.plan import Plan, plan
from te_plugin.torch.call import DTYPE_NAME, TORCH_DTYPE, define, dtype_name, empty, launch, target_of
from te_plugin.torch.options import Options
from te_plugin.torch.options import options as options_of


@dataclass(frozen=True)
class QuantizeOptions(Options):
    """The non-tensor arguments of a quantisation."""

    format: str = "e4m3"
    granularity: str = "tensor"
    pow2_scale: bool = False
    transpose: bool = False
    delayed: bool = False
    kernel: str = "auto"
    fallback: str = "error"


@dataclass
class QuantizedTensor:
    """x[R,C] in FP8: value = data * scale_inv.

    data[R,C] has the torch dtype of `dtype`. scale_inv is FP32 (uint8 exponents for "mx"), shaped by `granularity`:
    tensor [1]; row [R]; block_1x128 [R, ceil(C/128)]; block_128x128 [ceil(R/128), ceil(C/128)]; mx [R, ceil(C/32)].
    data_t[C,R] and scale_inv_t are the transposed copy, scaled along its own rows, when it was asked for.
    stats[2] in FP32: amax (NaN kept) and the number of non-finite values of x.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    granularity: str
    dtype: str
    stats: torch.Tensor
    data_t: torch.Tensor | None = None
    scale_inv_t: torch.Tensor | None = None
    shape: torch.Size | None = None

    @property
    def amax(self) -> torch.Tensor:
        return self.stats[0]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, in the shape that was quantised."""
        y = dequantize(self.data, self.scale_inv, self.granularity, self.dtype, dtype)
        return y.view(self.shape) if self.shape is not None else y

    def dequantize_transpose(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values of the transposed copy [C,R]."""
        if self.data_t is None:
            raise ValueError("this tensor was quantised without transpose=True")
        return dequantize(self.data_t, self.scale_inv_t, self.granularity, self.dtype, dtype)


@functools.lru_cache(maxsize=4096)
def _plan(rows, columns, dtype, device, key) -> Plan:
    o = QuantizeOptions.from_key(key)
    problem = QuantizeProblem(rows, columns, dtype, o.format, o.granularity, o.pow2_scale, o.transpose, o.delayed)
    return plan(problem, target_of(device), o.kernel, o.fallback)


def _outputs(rows, columns, o: QuantizeOptions):
    """Shape and dtype of data, scale_inv, stats, and where they are asked for data_t, scale_inv_t."""
    fp8 = TORCH_DTYPE[o.format]
    scale_dtype = torch.uint8 if o.granularity == "mx" else torch.float32
    made = (((rows, columns), fp8), (scale_shape(rows, columns, o.granularity), scale_dtype), ((2,), torch.float32))
    if not o.transpose:
        return made
    return (*made, ((columns, rows), fp8), (scale_shape(columns, rows, o.granularity), scale_dtype))


def _stage(o: QuantizeOptions) -> str:
    if o.delayed:
        return "given_transpose" if o.transpose else "given"
    return "transpose" if o.transpose else "plain"


@functools.lru_cache(maxsize=4096)
def _prepared(rows, columns, dtype: torch.dtype, device, key):
    """What a call needs besides its tensors: the plan, its stage, the outputs."""
    o = QuantizeOptions.from_key(key)
    return _plan(rows, columns, DTYPE_NAME[dtype], device, key), _stage(o), _outputs(rows, columns, o)


def quantize_impl(x, scale, options: str):
    """x[R,C] (rows may be strided) -> data, scale_inv, data_t, scale_inv_t, stats; empty transposed copies unless asked for."""
    data, scale_inv, data_t, scale_inv_t, stats = _run(x, scale, options)
    if data_t is None:
        data_t, scale_inv_t = data.new_empty(0), scale_inv.new_empty(0)
    return data, scale_inv, data_t, scale_inv_t, stats


def _run(x, scale, options: str):
    """quantize_impl with None in place of empty transposed copies."""
    rows, columns = x.shape
    if x.stride(-1) != 1 and columns != 1:
        x = x.contiguous()
    device = x.device
    if x.dtype not in DTYPE_NAME:
        dtype_name(x)  # raises
    chosen, stage, specs = _prepared(rows, columns, x.dtype, device, options)
    outputs = [torch.empty(*shape, dtype=dtype, device=device) for shape, dtype in specs]  # as `empty` does
    data, scale_inv, stats = outputs[:3]
    data_t, scale_inv_t = outputs[3:] or (None, None)
    if stage == "given_transpose":
        launch(chosen, stage, x, scale, data, data_t, scale_inv, stats, *chosen.attributes)
        scale_inv_t.copy_(scale_inv)
    elif stage == "given":
        launch(chosen, stage, x, scale, data, scale_inv, stats, *chosen.attributes)
    elif stage == "transpose":
        launch(chosen, stage, x, data, scale_inv, data_t, scale_inv_t, stats, *chosen.attributes)
    else:
        launch(chosen, stage, x, data, scale_inv, stats, *chosen.attributes)
    return data, scale_inv, data_t, scale_inv_t, stats


def _quantize_fake(x, scale, options: str):
    made = [empty(shape, dtype, x.device) for shape, dtype in _outputs(*x.shape, QuantizeOptions.from_key(options))]
    data, scale_inv, stats = made[:3]
    data_t, scale_inv_t = made[3:] or (data.new_empty(0), scale_inv.new_empty(0))
    return data, scale_inv, data_t, scale_inv_t, stats


define("quantize(Tensor x, Tensor? scale, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", quantize_impl,
       _quantize_fake)
_quantize_op = torch.ops.te_plugin.quantize.default


def _dequantize_impl(data, scale_inv, options: str, dtype: torch.dtype):
    o = QuantizeOptions.from_key(options)
    chosen = _plan(data.shape[0], data.shape[1], "fp32", data.device, options)
    y = empty(data.shape, dtype, data.device)
    launch(chosen, "dequantize", data, scale_inv, y, numerics.GRANULARITY_CODE[o.granularity], numerics.FORMATS[o.format].code)
    return y


define("dequantize(Tensor data, Tensor scale_inv, str options, ScalarType dtype) -> Tensor", _dequantize_impl,
       lambda data, scale_inv, options, dtype: data.new_empty(data.shape, dtype=dtype))
_dequantize_op = torch.ops.te_plugin.dequantize.default


def dequantize(data, scale_inv, granularity: str, format: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """data[R,C] * scale_inv in FP32, rounded once to `dtype` (FP32 or BF16)."""
    key = options_of(QuantizeOptions, format, granularity).key()
    if torch.compiler.is_compiling():
        return _dequantize_op(data, scale_inv, key, dtype)
    return _dequantize_impl(data, scale_inv, key, dtype)


def quantize_2d(x: torch.Tensor, options: QuantizeOptions, scale: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantise x[R,C] by ready-made options. The fast path of the layers: no shape checks, no autograd."""
    if torch.compiler.is_compiling():
        data, scale_inv, data_t, scale_inv_t, stats = _quantize_op(x, scale, options.key())
    else:
        data, scale_inv, data_t, scale_inv_t, stats = _run(x, scale, options.key())
    if not options.transpose:
        data_t = scale_inv_t = None
    return QuantizedTensor(data, scale_inv, options.granularity, options.format, stats, data_t, scale_inv_t)


def quantize(
    x: torch.Tensor,
    dtype: str = "e4m3",
    granularity: str = "tensor",
    *,
    amax: torch.Tensor | float | None = None,
    pow2_scale: bool = False,
    transpose: bool = False,
    kernel: str = "auto",
    fallback: str = "error",
) -> QuantizedTensor:
    """Quantise x[..., C] (leading dimensions are rows) to FP8 by the rules of numerics.py.

    dtype: e4m3, e5m2, e4m3_fnuz, e5m2_fnuz. granularity: tensor, row, block_1x128, block_128x128, mx.
    amax: the largest magnitude to scale for, in place of this tensor's own (granularity tensor only).
    Raises ValueError for unknown names or an x without dimensions.
    """
    if x.dim() < 1:
        raise ValueError("quantize takes a tensor with at least one dimension, got a scalar")
    scale = None
    if amax is not None:
        if granularity != "tensor":
            raise ValueError(f"amax is a per-tensor statistic; granularity is {granularity!r}")
        scale = scale_from_amax(torch.as_tensor(amax, dtype=torch.float32, device=x.device).reshape(1),
                                numerics.FORMATS[dtype], pow2_scale)
    if dtype not in numerics.FORMATS or granularity not in numerics.GRANULARITIES:
        QuantizeProblem(1, 1, "fp32", dtype, granularity)  # its ValueError names the wrong one
    pow2_scale = bool(pow2_scale) and amax is None
    options = options_of(QuantizeOptions, dtype, granularity, pow2_scale, bool(transpose), amax is not None, kernel, fallback)
    made = quantize_2d(x.detach().reshape(-1, x.shape[-1]), options, scale)
    made.shape = x.shape
    return made


def scale_from_amax(amax: torch.Tensor, fmt: numerics.Fp8Format, pow2: bool = False) -> torch.Tensor:
    """FP32 scale (not its inverse) of an amax tensor, on its device; the torch twin of numerics.scale_from_amax."""
    amax = torch.where(torch.isinf(amax), numerics.FLT_MAX, amax)
    # A tensor, not a number: torch computes number / tensor as number * reciprocal, which rounds twice.
    limit = torch.full_like(amax, fmt.max)
    if pow2:
        mantissa, exponent = torch.frexp(amax / limit)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 126)
        scale = torch.ldexp(torch.ones_like(amax), -exponent)
        scale = torch.where(torch.isnan(amax), amax, scale)
    else:
        scale = (limit / amax).clamp(max=numerics.FLT_MAX)
    return torch.where(amax == 0, torch.ones_like(amax), scale)
