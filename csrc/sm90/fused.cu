// rms_norm_quantize, swiglu_quantize, dswiglu_quantize: an op and the quantisation of its output, which is never written in BF16. One pass over
// the inputs, two where scales need an amax first.
//
// The bytes equal those of the op followed by quantize (the values are rounded to BF16 in between). `scale` is given for delayed
// scaling; data_t and scale_inv_t are given when the transposed copy is wanted.
#include "fused.cuh"
#include "quantize_host.h"

namespace te {

void norm_quantize(const Context&, const bf16*, int64_t, const bf16*, int64_t, bf16*, const void*, bool, float*, float, const QuantArgs&, int64_t, int64_t);
void swiglu_quantize(const Context&, const SwigluSource&, const QuantArgs&, int64_t, int64_t);
void dswiglu_quantize(const Context&, const SwigluGradientSource&, const QuantArgs&, int64_t, int64_t);

namespace {

using Maybe = Optional<TensorView>;

void check_fused(int64_t granularity, int64_t format, int64_t width, const char* what) {
  TE_CHECK(format == kE4M3 || granularity == kTensor,
           "fused kernels write e5m2 with tensor scaling only; quantise the output of the op with quantize for granularity " << granularity);
  TE_CHECK(width % 8 == 0, what << " " << width << " must be a multiple of 8 for the fused kernel; use the op and quantize");
}

// BF16 [R, C] whose rows start on 16 bytes. Returns the row stride.
int64_t check_bf16_rows(const TensorView& t, const char* name) {
  TE_CHECK(is_bf16(t), name << " must be bfloat16 for the fused kernel");
  const int64_t stride = row_stride(t, name);
  TE_CHECK(aligned(pointer<const void>(t), 16) && stride % 8 == 0, name << " rows must start on 16 bytes for the fused kernel");
  return stride;
}

// x[R,C] bf16, residual[R,C] or None, w[C] bf16 or fp32, h[R,C] or None (x + residual, with residual only), rstd[R].
void rms_norm_quantize(TensorView x, Maybe residual, TensorView w, Maybe h, TensorView rstd, Maybe scale, TensorView data, TensorView scale_inv,
                       Maybe data_t, Maybe scale_inv_t, TensorView stats, double eps, int64_t granularity, int64_t format, int64_t pow2) {
  const Launch l(x);
  const int64_t stride = check_bf16_rows(x, "x"), R = x.size(0), C = x.size(1);
  check_fused(granularity, format, C, "row width");
  check_row_width(C);
  TE_CHECK(residual.has_value() == h.has_value(), "residual and h (their sum) go together: give both or none");
  check_shape(w, "w", {C});
  check_contiguous(w, "w");
  check_same_device(w, x, "w");
  TE_CHECK((is_f32(w) || is_bf16(w)) && aligned(pointer<const void>(w), 16), "w must be bfloat16 or float32 and start on 16 bytes");
  check_f32(rstd, "rstd");
  check_shape(rstd, "rstd", {R});
  check_same_device(rstd, x, "rstd");
  int64_t residual_stride = 0;
  if (residual.has_value()) {
    residual_stride = check_bf16_rows(residual.value(), "residual");
    check_shape(residual.value(), "residual", {R, C});
    check_same_device(residual.value(), x, "residual");
    check_bf16_rows(h.value(), "h");
    check_shape(h.value(), "h", {R, C});
    check_contiguous(h.value(), "h");
    check_same_device(h.value(), x, "h");
  }
  check_same_device(data, x, "data");
  const QuantArgs q = check_quantize({data, scale_inv, data_t, scale_inv_t, stats, scale}, R, C, granularity, format, pow2 != 0);
  const Marks unknown{pointer<float>(rstd), R, kUnknownRstd};
  if (!begin_quantize(l, q, granularity, needs_amax_first(q, granularity) ? Marks{} : unknown)) return;
  bf16* sum = h.has_value() ? pointer<bf16>(h.value()) : nullptr;
  norm_quantize(l, pointer<const bf16>(x), stride, residual.has_value() ? pointer<const bf16>(residual.value()) : nullptr, residual_stride, sum,
                pointer<const void>(w), is_f32(w), pointer<float>(rstd), static_cast<float>(eps), q, granularity, format);
  TE_LAUNCHED("rms_norm_quantize");
}

// x[R,2C] = [gate | up] bf16 -> data[R,C].
void swiglu_quantize_entry(TensorView x, Maybe scale, TensorView data, TensorView scale_inv, Maybe data_t, Maybe scale_inv_t, TensorView stats,
                           int64_t granularity, int64_t format, int64_t pow2) {
  const Launch l(x);
  const int64_t stride = check_bf16_rows(x, "x"), R = x.size(0), C = x.size(1) / 2;
  TE_CHECK(x.size(1) % 2 == 0, "x must be [R, 2C] = [gate | up]; " << x.size(1) << " columns are odd");
  check_fused(granularity, format, C, "width");
  check_same_device(data, x, "data");
  const QuantArgs q = check_quantize({data, scale_inv, data_t, scale_inv_t, stats, scale}, R, C, granularity, format, pow2 != 0);
  if (!begin_quantize(l, q, granularity)) return;
  swiglu_quantize(l, SwigluSource{pointer<const bf16>(x), stride, C}, q, granularity, format);
  TE_LAUNCHED("swiglu_quantize");
}

// dy[R,C], x[R,2C] bf16 -> data[R,2C] of dx = [d_gate | d_up]. C is a multiple of 128, so that no scale block straddles the halves.
void dswiglu_quantize_entry(TensorView dy, TensorView x, Maybe scale, TensorView data, TensorView scale_inv, Maybe data_t, Maybe scale_inv_t,
                            TensorView stats, int64_t granularity, int64_t format, int64_t pow2) {
  const Launch l(x);
  const int64_t stride = check_bf16_rows(x, "x"), dy_stride = check_bf16_rows(dy, "dy"), R = x.size(0), C = x.size(1) / 2;
  check_shape(dy, "dy", {R, C});
  check_shape(x, "x", {R, 2 * C});
  check_same_device(dy, x, "dy");
  check_fused(granularity, format, C, "width");
  TE_CHECK(C % kTile == 0, "width " << C << " must be a multiple of 128 for dswiglu_quantize; use swiglu_backward and quantize");
  check_same_device(data, x, "data");
  const QuantArgs q = check_quantize({data, scale_inv, data_t, scale_inv_t, stats, scale}, R, 2 * C, granularity, format, pow2 != 0);
  if (!begin_quantize(l, q, granularity)) return;
  dswiglu_quantize(l, SwigluGradientSource{pointer<const bf16>(dy), pointer<const bf16>(x), dy_stride, stride, C}, q, granularity, format);
  TE_LAUNCHED("dswiglu_quantize");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_quantize, te::rms_norm_quantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu_quantize, te::swiglu_quantize_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dswiglu_quantize, te::dswiglu_quantize_entry);
