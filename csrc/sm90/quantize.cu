// quantize, quantize_transpose, quantize_used, quantize_used_transpose, quantize_with_scale, quantize_with_scale_transpose,
// dequantize: entry points.
//
// Rules of every number: te_plugin/numerics.py. Shapes: x[R, C] (rows may be apart), data[R, C], data_t[C, R]; scale_inv as in
// check_quantize; stats[2] = amax (NaN kept), number of non-finite values.
#include "quantize_host.h"

namespace te {

void quantize_bf16(const Context&, const void*, int64_t, bool, const QuantArgs&, int64_t, int64_t);
void quantize_fp16(const Context&, const void*, int64_t, bool, const QuantArgs&, int64_t, int64_t);
void quantize_fp32(const Context&, const void*, int64_t, bool, const QuantArgs&, int64_t, int64_t);

namespace {

void run(const TensorView& x, const QuantOutputs& o, int64_t granularity, int64_t format, bool pow2, const TensorView* used = nullptr) {
  const Launch l(x);
  const Type type = float_type(x, "x");
  const int64_t stride = row_stride(x, "x");
  check_same_device(o.data, x, "data");
  QuantArgs q = check_quantize(o, x.size(0), x.size(1), granularity, format, pow2);
  if (used) {
    TE_CHECK(is_dtype(*used, kDLInt, 64), "used must be int64: how many rows of x hold values");
    check_shape(*used, "used", {1});
    check_same_device(*used, x, "used");
    q.used = pointer<const int64_t>(*used);
  }
  if (!begin_quantize(l, q, granularity)) return;
  const void* p = pointer<const void>(x);
  const bool vectors = rows_are_vectors(p, q.C, stride, x.dtype().bits / 8);
  (type == Type::bf16 ? quantize_bf16 : type == Type::fp16 ? quantize_fp16 : quantize_fp32)(l, p, stride, vectors, q, granularity, format);
  TE_LAUNCHED("quantize");
}

void quantize(TensorView x, TensorView data, TensorView scale_inv, TensorView stats, int64_t granularity, int64_t format, int64_t pow2) {
  run(x, {data, scale_inv, {}, {}, stats, {}}, granularity, format, pow2 != 0);
}
void quantize_transpose(TensorView x, TensorView data, TensorView scale_inv, TensorView data_t, TensorView scale_inv_t, TensorView stats,
                        int64_t granularity, int64_t format, int64_t pow2) {
  run(x, {data, scale_inv, data_t, scale_inv_t, stats, {}}, granularity, format, pow2 != 0);
}
// used[1], int64 on the device: the rows of x behind that many count as 0, whatever they hold.
void quantize_used(TensorView x, TensorView used, TensorView data, TensorView scale_inv, TensorView stats, int64_t granularity, int64_t format,
                   int64_t pow2) {
  run(x, {data, scale_inv, {}, {}, stats, {}}, granularity, format, pow2 != 0, &used);
}
void quantize_used_transpose(TensorView x, TensorView used, TensorView data, TensorView scale_inv, TensorView data_t, TensorView scale_inv_t,
                             TensorView stats, int64_t granularity, int64_t format, int64_t pow2) {
  run(x, {data, scale_inv, data_t, scale_inv_t, stats, {}}, granularity, format, pow2 != 0, &used);
}
void quantize_with_scale(TensorView x, TensorView scale, TensorView data, TensorView scale_inv, TensorView stats, int64_t format) {
  run(x, {data, scale_inv, {}, {}, stats, scale}, kTensor, format, false);
}
void quantize_with_scale_transpose(TensorView x, TensorView scale, TensorView data, TensorView data_t, TensorView scale_inv, TensorView stats,
                                   int64_t format) {
  run(x, {data, scale_inv, data_t, scale_inv, stats, scale}, kTensor, format, false);
}

// Eight codes a thread.
template <typename T, int FMT>
__global__ void dequantize_kernel(const uint8_t* data, const void* scale_inv, T* y, int64_t R, int64_t C, int granularity) {
  const int64_t per_row = (C + 7) / 8;
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (index >= R * per_row) return;
  const int64_t r = index / per_row, c = index % per_row * 8;
  const float* f = static_cast<const float*>(scale_inv);
  float s;
  if (granularity == kTensor) s = f[0];
  else if (granularity == kRow) s = f[r];
  else if (granularity == kBlock1x128) s = f[r * ((C + 127) / 128) + c / 128];
  else if (granularity == kBlock128x128) s = f[r / 128 * ((C + 127) / 128) + c / 128];
  else s = e8m0_decode(static_cast<const uint8_t*>(scale_inv)[r * ((C + 31) / 32) + c / 32]);
  const uint8_t* in = data + r * C + c;
  const int n = static_cast<int>(C - c < 8 ? C - c : 8);
  uint8_t code[8];
  const bool whole = n == 8 && C % 8 == 0 && (reinterpret_cast<uintptr_t>(data) & 7) == 0;
  if (whole) {
    const uint2 w = *reinterpret_cast<const uint2*>(in);
#pragma unroll
    for (int j = 0; j < 4; ++j) code[j] = w.x >> (8 * j), code[4 + j] = w.y >> (8 * j);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) code[j] = j < n ? in[j] : 0;
  }
  Vec8<T> v;
#pragma unroll
  for (int j = 0; j < 8; j += 2) v.set2(j, decode<FMT>(code[j]) * s, decode<FMT>(code[j + 1]) * s);
  T* out = y + r * C + c;
  if (whole && (reinterpret_cast<uintptr_t>(y) & 15) == 0) v.store(out);
  else v.store_some(out, n);
}

void dequantize(TensorView data, TensorView scale_inv, TensorView y, int64_t granularity, int64_t format) {
  const Launch l(data);
  TE_CHECK(granularity >= kTensor && granularity <= kMx, "granularity code " << granularity << " is unknown (0 to 4)");
  check_fp8(data, "data", format);
  TE_CHECK(data.ndim() == 2, "data must have two dimensions, got " << shape_text(data));
  const int64_t R = data.size(0), C = data.size(1);
  check_shape(y, "y", {R, C});
  check_contiguous(y, "y");
  check_contiguous(scale_inv, "scale_inv");
  check_same_device(y, data, "y");
  check_same_device(scale_inv, data, "scale_inv");
  if (granularity == kTensor) check_shape(scale_inv, "scale_inv", {1});
  else if (granularity == kRow) check_shape(scale_inv, "scale_inv", {R});
  else if (granularity == kBlock1x128) check_shape(scale_inv, "scale_inv", {R, ceil_div(C, 128)});
  else if (granularity == kBlock128x128) check_shape(scale_inv, "scale_inv", {ceil_div(R, 128), ceil_div(C, 128)});
  else check_shape(scale_inv, "scale_inv", {R, ceil_div(C, 32)});
  TE_CHECK(granularity == kMx ? scale_inv.dtype().bits == 8 : is_f32(scale_inv), "scale_inv must be float32 (uint8 for MX)");
  const Type type = float_type(y, "y");
  if (R == 0 || C == 0) return;
  const unsigned grid = static_cast<unsigned>(ceil_div(R * ceil_div(C, 8), 256));
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    auto kernel = format == kE4M3 ? dequantize_kernel<T, kE4M3> : dequantize_kernel<T, kE5M2>;
    kernel<<<grid, 256, 0, l.stream>>>(pointer<const uint8_t>(data), pointer<const void>(scale_inv), pointer<T>(y), R, C, static_cast<int>(granularity));
  });
  TE_LAUNCHED("dequantize");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize, te::quantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_transpose, te::quantize_transpose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_used, te::quantize_used);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_used_transpose, te::quantize_used_transpose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_with_scale, te::quantize_with_scale);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_with_scale_transpose, te::quantize_with_scale_transpose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize, te::dequantize);
