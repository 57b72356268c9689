"""Quantisation for torch: a tensor, its FP8 copies and their scales."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from te_plugin import numerics
from te_plugin.ops.quantize.problem import LARGE_EXPERT, QuantizeProblem, scale_shape
from te_plugin.plan import Plan, plan
from te_plugin.torch.call import TORCH_DTYPE, define, dtype_name, launch, target_of
from te_plugin.torch.options import Options


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


def outputs_of(rows: int, columns: int, device, o: QuantizeOptions):
    """Room for data, scale_inv, data_t, scale_inv_t, stats of a quantised [rows, columns]; empty copies unless asked for."""
    fp8 = TORCH_DTYPE[o.format]
    scale_dtype = torch.uint8 if o.granularity == "mx" else torch.float32
    empty = functools.partial(torch.empty, device=device)
    data = empty((rows, columns), dtype=fp8)
    scale_inv = empty(scale_shape(rows, columns, o.granularity), dtype=scale_dtype)
    stats = empty((2,), dtype=torch.float32)
    if o.transpose:
        return (data, scale_inv, empty((columns, rows), dtype=fp8),
                empty(scale_shape(columns, rows, o.granularity), dtype=scale_dtype), stats)
    return data, scale_inv, empty((0,), dtype=fp8), empty((0,), dtype=scale_dtype), stats


def quantize_impl(x, scale, options: str):
    """x[R,C] (rows may be strided) -> data, scale_inv, data_t, scale_inv_t, stats; empty transposed copies unless asked for."""
    o = QuantizeOptions.from_key(options)
    if (x.stride(-1) != 1 and x.shape[-1] != 1) or (x.shape[0] > 1 and x.stride(0) < x.shape[1]):
        x = x.contiguous()  # columns apart, or rows that share memory (the gradient of a sum over rows)
    chosen = _plan(x.shape[0], x.shape[1], dtype_name(x), x.device, options)
    outputs = outputs_of(x.shape[0], x.shape[1], x.device, o)
    _fill(chosen, o, x, scale, outputs)
    return outputs


def _fill(chosen: Plan, o: QuantizeOptions, x, scale, outputs) -> None:
    data, scale_inv, data_t, scale_inv_t, stats = outputs
    if o.delayed and o.transpose:
        launch(chosen, "given_transpose", x, scale, data, data_t, scale_inv, stats, *chosen.attributes)
        scale_inv_t.copy_(scale_inv)
    elif o.delayed:
        launch(chosen, "given", x, scale, data, scale_inv, stats, *chosen.attributes)
    elif o.transpose:
        launch(chosen, "transpose", x, data, scale_inv, data_t, scale_inv_t, stats, *chosen.attributes)
    else:
        launch(chosen, "plain", x, data, scale_inv, stats, *chosen.attributes)


define("quantize(Tensor x, Tensor? scale, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", quantize_impl,
       lambda x, scale, options: outputs_of(x.shape[0], x.shape[1], x.device, QuantizeOptions.from_key(options)))
_quantize_op = torch.ops.te_plugin.quantize.default


def quantize_used_impl(x, used, options: str):
    """As quantize_impl, with scales of this tensor, where only the first used[1] (int64) rows of x count and the others are 0."""
    o = QuantizeOptions.from_key(options)
    x = x.contiguous()
    chosen = _plan(x.shape[0], x.shape[1], dtype_name(x), x.device, options)
    if "used" not in chosen.kernel.entry_points:
        inside = torch.arange(x.shape[0], device=x.device) < used
        return quantize_impl(torch.where(inside[:, None], x, 0), None, options)
    outputs = outputs_of(x.shape[0], x.shape[1], x.device, o)
    data, scale_inv, data_t, scale_inv_t, stats = outputs
    if o.transpose:
        launch(chosen, "used_transpose", x, used, data, scale_inv, data_t, scale_inv_t, stats, *chosen.attributes)
    else:
        launch(chosen, "used", x, used, data, scale_inv, stats, *chosen.attributes)
    return outputs


define("quantize_used(Tensor x, Tensor used, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", quantize_used_impl,
       lambda x, used, options: outputs_of(x.shape[0], x.shape[1], x.device, QuantizeOptions.from_key(options)))


def _dequantize_impl(data, scale_inv, options: str, dtype: torch.dtype):
    o = QuantizeOptions.from_key(options)
    chosen = _plan(data.shape[0], data.shape[1], "fp32", data.device, options)
    y = torch.empty(data.shape, dtype=dtype, device=data.device)
    launch(chosen, "dequantize", data, scale_inv, y, numerics.GRANULARITY_CODE[o.granularity], numerics.FORMATS[o.format].code)
    return y


define("dequantize(Tensor data, Tensor scale_inv, str options, ScalarType dtype) -> Tensor", _dequantize_impl,
       lambda data, scale_inv, options, dtype: data.new_empty(data.shape, dtype=dtype))
_dequantize_op = torch.ops.te_plugin.dequantize.default


def dequantize(data, scale_inv, granularity: str, format: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """data[R,C] * scale_inv in FP32, rounded once to `dtype` (FP32 or BF16)."""
    key = QuantizeOptions(format=format, granularity=granularity).key()
    if torch.compiler.is_compiling():
        return _dequantize_op(data, scale_inv, key, dtype)
    return _dequantize_impl(data, scale_inv, key, dtype)


def quantize_2d(x: torch.Tensor, options: QuantizeOptions, scale: torch.Tensor | None = None,
                used: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantise x[R,C] by ready-made options. The fast path of the layers: no shape checks, no autograd.

    used: int64[1] on x's device; rows from there on count as 0, whatever they hold. scale and used do not go together.
    """
    if used is not None:
        quantise = torch.ops.te_plugin.quantize_used if torch.compiler.is_compiling() else quantize_used_impl
        key = options.key() if torch.compiler.is_compiling() else _cached_key(options)
        data, scale_inv, data_t, scale_inv_t, stats = quantise(x, used, key)
    elif torch.compiler.is_compiling():
        data, scale_inv, data_t, scale_inv_t, stats = _quantize_op(x, scale, options.key())
    else:
        data, scale_inv, data_t, scale_inv_t, stats = quantize_impl(x, scale, _cached_key(options))
    if not options.transpose:
        data_t = scale_inv_t = None
    return QuantizedTensor(data, scale_inv, options.granularity, options.format, stats, data_t, scale_inv_t)


def _expert_outputs(weight, o: QuantizeOptions):
    experts, n, k = weight.shape
    fp8, scale_dtype = TORCH_DTYPE[o.format], torch.uint8 if o.granularity == "mx" else torch.float32
    shape = lambda r, c: (experts,) if o.granularity == "tensor" else (experts, *scale_shape(r, c, o.granularity))  # noqa: E731
    empty = functools.partial(torch.empty, device=weight.device)
    turned = ((experts, k, n), shape(k, n)) if o.transpose else ((0,), (0,))
    return (empty((experts, n, k), dtype=fp8), empty(shape(n, k), dtype=scale_dtype), empty(turned[0], dtype=fp8),
            empty(turned[1], dtype=scale_dtype), empty((2,), dtype=torch.float32))


def _experts_one_by_one(weight, o: QuantizeOptions, key: str):
    """Every expert is read once and both its copies written: best where one of them fills the GPU."""
    experts, n, k = weight.shape
    chosen = _plan(n, k, dtype_name(weight), weight.device, key)
    data, scale_inv, data_t, scale_inv_t, _ = _expert_outputs(weight, o)
    stats = torch.empty((experts, 2), dtype=torch.float32, device=weight.device)
    of = lambda scales, e: scales[e:e + 1] if o.granularity == "tensor" else scales[e]  # noqa: E731
    for e in range(experts):
        turned = (data_t[e], of(scale_inv_t, e)) if o.transpose else (data_t, scale_inv_t)
        _fill(chosen, o, weight[e], None, (data[e], of(scale_inv, e), *turned, stats[e]))
    return data, scale_inv, data_t, scale_inv_t, torch.stack([stats[:, 0].amax(), stats[:, 1].sum()])


def _experts_at_once(weight, o: QuantizeOptions):
    """One launch a copy whatever the number of experts: their rows as one matrix [E*N,K], or (tensor) each of them as a row."""
    experts, n, k = weight.shape
    plain = dataclasses.replace(o, transpose=False)
    cast = lambda x, options: quantize_impl(x, None, _cached_key(options))  # noqa: E731
    if o.granularity == "tensor":
        data, scale, data_t, scale_t, stats = cast(weight.view(experts, n * k), dataclasses.replace(plain, granularity="row"))
    else:
        data, scale, data_t, scale_t, stats = cast(weight.view(experts * n, k), plain)
        scale = scale.view(experts, -1, *scale.shape[1:])
    data = data.view(weight.shape)
    if not o.transpose:
        return data, scale, data_t, scale_t, stats
    if o.granularity in ("tensor", "block_128x128"):
        # A scale that does not depend on the direction gives the same codes in either.
        data_t = data.view(torch.uint8).transpose(1, 2).contiguous().view(data.dtype)
        return data, scale, data_t, scale.clone() if scale.dim() == 1 else scale.transpose(1, 2).contiguous(), stats
    data_t, scale_t, *_ = cast(weight.transpose(1, 2).reshape(experts * k, n), plain)
    return data, scale, data_t.view(experts, k, n), scale_t.view(experts, k, *scale_t.shape[1:]), stats


def quantize_experts_impl(weight, options: str):
    o, weight = QuantizeOptions.from_key(options), weight.contiguous()
    spans_experts = o.granularity == "block_128x128" and weight.shape[1] % numerics.BLOCK
    if spans_experts or weight.shape[1] * weight.shape[2] >= LARGE_EXPERT:
        return _experts_one_by_one(weight, o, options)
    return _experts_at_once(weight, o)


define("quantize_experts(Tensor weight, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", quantize_experts_impl,
       lambda weight, options: _expert_outputs(weight, QuantizeOptions.from_key(options)))


def quantize_experts(weight: torch.Tensor, options: QuantizeOptions) -> QuantizedTensor:
    """Quantise weight[E,N,K] with scales of its own for every expert: the bits of each expert quantised alone.

    data[E,N,K]; scale_inv[E] (tensor), [E,N] (row), [E,ceil(N/128),ceil(K/128)] (block_128x128), [E,N,ceil(K/128)] (block_1x128)
    or [E,N,ceil(K/32)] (mx); data_t[E,K,N] and scale_inv_t likewise, for the transposed weights. stats[2] are those of all
    experts. Large experts are read one after the other, small ones all in one launch a copy.
    """
    quantise = torch.ops.te_plugin.quantize_experts if torch.compiler.is_compiling() else quantize_experts_impl
    key = options.key() if torch.compiler.is_compiling() else _cached_key(options)
    data, scale_inv, data_t, scale_inv_t, stats = quantise(weight, key)
    if not options.transpose:
        data_t = scale_inv_t = None
    return QuantizedTensor(data, scale_inv, options.granularity, options.format, stats, data_t, scale_inv_t)


@functools.lru_cache(maxsize=1024)
def _cached_key(options: QuantizeOptions) -> str:
    return options.key()


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
    options = QuantizeOptions(dtype, granularity, pow2_scale if amax is None else False, transpose, amax is not None, kernel,
                              fallback)
    QuantizeProblem(1, 1, "fp32", dtype, granularity)  # its ValueError names a wrong dtype or granularity
    made = quantize_2d(x.detach().reshape(-1, x.shape[-1]), options, scale)
    made.shape = x.shape
    return made


def scale_from_amax(amax: torch.Tensor, fmt: numerics.Fp8Format, pow2: bool = False) -> torch.Tensor:
    """FP32 scale (not its inverse) of an amax tensor, on its device; the torch twin of numerics.scale_from_amax."""
    amax = amax.masked_fill(torch.isinf(amax), numerics.FLT_MAX)
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
