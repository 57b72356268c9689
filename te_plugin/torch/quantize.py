"""Quantisation for torch: a tensor, its FP8 copies and their scales."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from te_plugin import numerics
from te_plugin.ops.checks import check_flags
from te_plugin.ops.grouped_gemm.problem import LARGE_EXPERT
from te_plugin.ops.quantize.problem import QuantizeProblem, check_format, check_granularity, scale_shape
from te_plugin.plan import Plan, plan, remember_unmeasured
from te_plugin.torch.call import TORCH_DTYPE, check_device, define, dtype_name, empty, is_direct, launch, target_of
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

    def problem(self, rows: int, columns: int, dtype: str) -> QuantizeProblem:
        """Of x[rows, columns]."""
        return QuantizeProblem(rows, columns, dtype, self.format, self.granularity, self.pow2_scale, self.transpose, self.delayed)


@dataclass
class QuantizedTensor:
    """x[R,C] in FP8: value = data * scale_inv.

    data[R,C] has the torch dtype of `dtype`. scale_inv is FP32 (uint8 exponents for "mx"), shaped by `granularity`:
    tensor [1]; row [R]; block_1x128 [R, ceil(C/128)]; block_128x128 [ceil(R/128), ceil(C/128)]; mx [R, ceil(C/32)]. Those of
    block_1x128 lie block after block in a GPU's memory (strides [1, R]); kernels take them either way.
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


@remember_unmeasured
def _plan(rows, columns, dtype, device, key) -> Plan:
    o = QuantizeOptions.from_key(key)
    return plan(o.problem(rows, columns, dtype), target_of(device), o.kernel, o.fallback)


class Spec(NamedTuple):
    """A tensor to allocate. by_block: 1x128 scales [lines, blocks], which lie block after block on a GPU: a kernel then writes
    those of a tile together (one by one they cost a seventh of the cast's time), and cuBLASLt takes them as they are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_block: bool = False


def scale_dtype(granularity: str) -> torch.dtype:
    return torch.uint8 if granularity == "mx" else torch.float32


def scale_spec(rows: int, columns: int, granularity: str) -> Spec:
    """Of the scale_inv of a quantised [rows, columns]."""
    return Spec(scale_shape(rows, columns, granularity), scale_dtype(granularity), granularity == "block_1x128")


def _specs(rows: int, columns: int, o: QuantizeOptions):
    """Of data, scale_inv, data_t, scale_inv_t, stats of a quantised [rows, columns]; None: not asked for."""
    fp8 = TORCH_DTYPE[o.format]
    copy = lambda r, c: (Spec((r, c), fp8), scale_spec(r, c, o.granularity))  # noqa: E731
    return *copy(rows, columns), *(copy(columns, rows) if o.transpose else (None, None)), Spec((2,), torch.float32)


def allocated(specs, device):
    return [spec and (torch.empty_strided(spec[0], (1, spec[0][0]), dtype=spec[1], device=device)
                      if spec[2] and device.type == "cuda" else
                      torch.empty(*spec[0], dtype=spec[1], device=device))  # as `empty` does
            for spec in specs]


def outputs_of(rows: int, columns: int, device, o: QuantizeOptions):
    """Room for data, scale_inv, data_t, scale_inv_t, stats of a quantised [rows, columns]; None for copies not asked for."""
    return allocated(_specs(rows, columns, o), device)


def as_op(outputs):
    """Such outputs as an op returns them: each once, and empty ones in place of None, which no schema of five tensors holds."""
    data, scale_inv, data_t, scale_inv_t, stats = outputs
    if data_t is None:
        data_t, scale_inv_t = data.new_empty(0), scale_inv.new_empty(0)
    elif scale_inv_t is scale_inv:
        scale_inv_t = scale_inv.clone()
    return data, scale_inv, data_t, scale_inv_t, stats


def _stage(o: QuantizeOptions) -> str:
    if o.delayed:
        return "given_transpose" if o.transpose else "given"
    return "transpose" if o.transpose else "plain"


@remember_unmeasured
def _prepared(rows, columns, dtype, device, key):
    """What a call needs besides its tensors: the plan, its stage, the outputs."""
    o = QuantizeOptions.from_key(key)
    stage, specs = _stage(o), list(_specs(rows, columns, o))
    if stage == "given_transpose":
        specs[3] = None  # one scale for both copies
    return _plan(rows, columns, dtype, device, key), stage, specs


def readable(x: torch.Tensor) -> torch.Tensor:
    """x[R,C] as the kernels read it: a copy where columns are apart, or rows share memory (the gradient of a sum over rows)."""
    rows, columns = x.shape
    row, column = x.stride()
    return x.contiguous() if (column != 1 and columns != 1) or (row < columns and rows > 1) else x


def quantize_impl(x, scale, options: str):
    """x[R,C] (rows may be strided) -> data, scale_inv, data_t, scale_inv_t, stats; None for transposed copies not asked for."""
    x, device = readable(x), x.device
    chosen, stage, specs = _prepared(*x.shape, dtype_name(x), device, options)
    outputs = allocated(specs, device)
    if stage == "given_transpose":
        outputs[3] = outputs[1]
    _fill(chosen, stage, x, scale, outputs)
    return outputs


def _fill(chosen: Plan, stage: str, x, scale, outputs) -> None:
    data, scale_inv, data_t, scale_inv_t, stats = outputs
    if stage == "given_transpose":
        launch(chosen, stage, x, scale, data, data_t, scale_inv, stats, *chosen.attributes)
    elif stage == "given":
        launch(chosen, stage, x, scale, data, scale_inv, stats, *chosen.attributes)
    elif stage == "transpose":
        launch(chosen, stage, x, data, scale_inv, data_t, scale_inv_t, stats, *chosen.attributes)
    else:
        launch(chosen, stage, x, data, scale_inv, stats, *chosen.attributes)


def _fake(x, options: str):
    return as_op(outputs_of(x.shape[0], x.shape[1], x.device, QuantizeOptions.from_key(options)))


define("quantize(Tensor x, Tensor? scale, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
       lambda x, scale, options: as_op(quantize_impl(x, scale, options)), lambda x, scale, options: _fake(x, options))
_quantize_op = torch.ops.te_plugin.quantize.default


def _quantize_used(x, used, options: str):
    """As quantize_impl, with scales of this tensor, where only the first used[1] (int64) rows of x count and the others are 0."""
    x = x.contiguous()
    chosen, stage, specs = _prepared(x.shape[0], x.shape[1], dtype_name(x), x.device, options)
    if "used" not in chosen.kernel.entry_points:
        inside = torch.arange(x.shape[0], device=x.device) < used
        return quantize_impl(torch.where(inside[:, None], x, 0), None, options)
    outputs = allocated(specs, x.device)
    data, scale_inv, data_t, scale_inv_t, stats = outputs
    if stage == "transpose":
        launch(chosen, "used_transpose", x, used, data, scale_inv, data_t, scale_inv_t, stats, *chosen.attributes)
    else:
        launch(chosen, "used", x, used, data, scale_inv, stats, *chosen.attributes)
    return outputs


define("quantize_used(Tensor x, Tensor used, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
       lambda x, used, options: as_op(_quantize_used(x, used, options)), lambda x, used, options: _fake(x, options))
_quantize_used_op = torch.ops.te_plugin.quantize_used.default


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
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dequantize writes torch.float32 or torch.bfloat16, not {dtype}")
    check_device("dequantize", "scale_inv", scale_inv, data.device)
    key = options_of(QuantizeOptions, format, granularity).key()
    if not is_direct(data):
        return _dequantize_op(data, scale_inv, key, dtype)
    return _dequantize_impl(data, scale_inv, key, dtype)


def quantize_2d(x: torch.Tensor, options: QuantizeOptions, scale: torch.Tensor | None = None,
                used: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantise x[R,C] by ready-made options. The fast path of the layers: no shape checks, no autograd.

    used: int64[1] on x's device; rows from there on count as 0, whatever they hold. scale and used do not go together.
    """
    key = options.key()
    if is_direct(x):
        outputs = quantize_impl(x, scale, key) if used is None else _quantize_used(x, used, key)
    else:
        outputs = _quantize_op(x, scale, key) if used is None else _quantize_used_op(x, used, key)
    return as_tensor(outputs, options.granularity, options.format, options.transpose)


def as_tensor(outputs, granularity: str, format: str, transpose: bool) -> QuantizedTensor:
    """The five outputs of a quantisation; without transposed copies None stands for them, also where an op gave empty ones."""
    data, scale_inv, data_t, scale_inv_t, stats = outputs
    if not transpose:
        data_t = scale_inv_t = None
    return QuantizedTensor(data, scale_inv, granularity, format, stats, data_t, scale_inv_t)


def _expert_specs(experts: int, n: int, k: int, o: QuantizeOptions):
    """_specs for experts' weights [E,N,K], each with scales of its own (line after line: an expert's are a slice)."""
    fp8, scale = TORCH_DTYPE[o.format], scale_dtype(o.granularity)
    shape = lambda r, c: (experts,) if o.granularity == "tensor" else (experts, *scale_shape(r, c, o.granularity))  # noqa: E731
    copy = lambda r, c: (Spec((experts, r, c), fp8), Spec(shape(r, c), scale))  # noqa: E731
    return *copy(n, k), *(copy(k, n) if o.transpose else (None, None)), Spec((2,), torch.float32)


def specs_of(shape, o: QuantizeOptions):
    """Of data, scale_inv, data_t, scale_inv_t, stats of a quantised matrix [R,C] or experts' weights [E,N,K]."""
    return _specs(*shape, o) if len(shape) == 2 else _expert_specs(*shape, o)


def _experts_one_by_one(weight, o: QuantizeOptions, key: str):
    """Every expert is read once and both its copies written: best where one of them fills the GPU."""
    experts, n, k = weight.shape
    chosen, stage, _ = _prepared(n, k, dtype_name(weight), weight.device, key)
    data, scale_inv, data_t, scale_inv_t, _ = allocated(specs_of(weight.shape, o), weight.device)
    stats = empty((experts, 2), torch.float32, weight.device)
    of = lambda scales, e: scales[e:e + 1] if o.granularity == "tensor" else scales[e]  # noqa: E731
    for e in range(experts):
        turned = (data_t[e], of(scale_inv_t, e)) if o.transpose else (None, None)
        _fill(chosen, stage, weight[e], None, (data[e], of(scale_inv, e), *turned, stats[e]))
    return data, scale_inv, data_t, scale_inv_t, torch.stack([stats[:, 0].amax(), stats[:, 1].sum()])


def _experts_at_once(weight, o: QuantizeOptions):
    """One launch a copy whatever the number of experts: their rows as one matrix [E*N,K], or (tensor) each of them as a row."""
    experts, n, k = weight.shape
    plain = dataclasses.replace(o, transpose=False)
    cast = lambda x, options: quantize_impl(x, None, options.key())  # noqa: E731
    if o.granularity == "tensor":
        data, scale, data_t, scale_t, stats = cast(weight.view(experts, n * k), dataclasses.replace(plain, granularity="row"))
    else:
        data, scale, data_t, scale_t, stats = cast(weight.view(experts * n, k), plain)
        scale = scale.contiguous().view(experts, -1, *scale.shape[1:])
    data = data.view(weight.shape)
    if not o.transpose:
        return data, scale, data_t, scale_t, stats
    if o.granularity in ("tensor", "block_128x128"):
        # A scale that does not depend on the direction gives the same codes in either. Clones: a transposed [E,1,1] is contiguous
        # already, and outputs of an op share no memory.
        turned = lambda x: x.transpose(1, 2).clone(memory_format=torch.contiguous_format)  # noqa: E731
        data_t = turned(data.view(torch.uint8)).view(data.dtype)
        return data, scale, data_t, scale.clone() if scale.dim() == 1 else turned(scale), stats
    data_t, scale_t, *_ = cast(weight.transpose(1, 2).reshape(experts * k, n), plain)
    return data, scale, data_t.view(experts, k, n), scale_t.contiguous().view(experts, k, *scale_t.shape[1:]), stats


def _quantize_experts(weight, options: str):
    o, weight = QuantizeOptions.from_key(options), weight.contiguous()
    spans_experts = o.granularity == "block_128x128" and weight.shape[1] % numerics.BLOCK
    if spans_experts or weight.shape[1] * weight.shape[2] >= LARGE_EXPERT:
        return _experts_one_by_one(weight, o, options)
    return _experts_at_once(weight, o)


define("quantize_experts(Tensor weight, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
       lambda weight, options: as_op(_quantize_experts(weight, options)),
       lambda weight, options: as_op(allocated(specs_of(weight.shape, QuantizeOptions.from_key(options)), weight.device)))


def quantize_experts(weight: torch.Tensor, options: QuantizeOptions) -> QuantizedTensor:
    """Quantise weight[E,N,K] with scales of its own for every expert: the bits of each expert quantised alone.

    data[E,N,K]; scale_inv[E] (tensor), [E,N] (row), [E,ceil(N/128),ceil(K/128)] (block_128x128), [E,N,ceil(K/128)] (block_1x128)
    or [E,N,ceil(K/32)] (mx); data_t[E,K,N] and scale_inv_t likewise, for the transposed weights. stats[2] are those of all
    experts. Large experts are read one after the other, small ones all in one launch a copy.
    """
    quantise = _quantize_experts if is_direct(weight) else torch.ops.te_plugin.quantize_experts
    return as_tensor(quantise(weight, options.key()), options.granularity, options.format, options.transpose)


def quantize_operand(x: torch.Tensor, options: QuantizeOptions, scale: torch.Tensor | None = None,
                     used: torch.Tensor | None = None) -> QuantizedTensor:
    """An operand of a layer by ready-made options: rows x[R,C] as quantize_2d, or experts' weights [E,N,K]."""
    return quantize_experts(x, options) if x.dim() == 3 else quantize_2d(x, options, scale, used)


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
    check_format(dtype)
    check_granularity(granularity)
    check_flags(pow2_scale=pow2_scale, transpose=transpose)
    scale = None
    if amax is not None:
        if granularity != "tensor":
            raise ValueError(f"amax is a per-tensor statistic; granularity is {granularity!r}")
        scale = scale_from_amax(_given_amax(amax, x.device), numerics.FORMATS[dtype], pow2_scale)
    pow2_scale = pow2_scale and amax is None
    options = options_of(QuantizeOptions, dtype, granularity, pow2_scale, transpose, amax is not None, kernel, fallback)
    made = quantize_2d(x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1]), options, scale)
    made.shape = x.shape
    return made


def _given_amax(amax: torch.Tensor | float, device) -> torch.Tensor:
    """FP32[1] on the device. The value of a tensor is not looked at: that would wait for the device."""
    if not isinstance(amax, torch.Tensor) and amax < 0:
        raise ValueError(f"amax={amax} is negative; it is a magnitude")
    given = torch.as_tensor(amax, dtype=torch.float32, device=device)
    if given.numel() != 1:
        raise ValueError(f"amax has shape {tuple(given.shape)}; one number is needed, the amax of the whole tensor")
    return given.reshape(1)


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
