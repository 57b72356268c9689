// RMSNorm: y = h * rstd * w with rstd = 1 / sqrt(mean(h^2) + eps), statistics in FP32; h = x, or x + residual rounded to their dtype.
// The gradient dh that reaches h by other ways is added to that of the norm before the one rounding of dx.
//
// dw sums over all rows. Rows are cut into at most 64 bands whose number depends on the shape alone; each band adds its rows in order,
// then the bands are added in order: the same bits for any number of threads.
#include <cmath>
#include <vector>

#include "export.h"
#include "parallel.h"
#include "row_kernels.h"
#include "rows.h"
#include "tensor.h"

namespace te {
namespace {

constexpr int64_t kMaxBands = 64;
constexpr int64_t kMinBandRows = 16;

std::vector<float> weight_as_float(const TensorView& w) {
  std::vector<float> out(w.numel());
  TE_SIMD_CALL(widen)(row_dtype(w), data<void>(w), w.numel(), out.data());
  return out;
}

void check_common(const TensorView& x, const TensorView& w, const TensorView& rstd) {
  check_rows(x, "x", 2, "[R, C]");
  check_device(w, "w", kDLCPU);
  check_dtype(w, "w", {DType::f32, DType::bf16, DType::f16});
  check_shape(w, "w", {x.size(1)}, "the features of x");
  check_contiguous(w, "w");
  check_f32(rstd, "rstd", {x.size(0)}, "the rows of x");
}

// residual and h: both or neither.
void forward(const TensorView& x, const TensorView* residual, const TensorView& w, const TensorView& y, const TensorView* h,
             const TensorView& rstd, double eps) {
  check_common(x, w, rstd);
  check_same(y, "y", x, "x");
  if (residual) check_same(*residual, "residual", x, "x"), check_same(*h, "h", x, "x");
  TE_CHECK(std::isfinite(eps) && eps >= 0, "eps is " << eps << "; expected a finite value of at least 0");
  const int64_t rows = x.size(0), cols = x.size(1);
  if (cols == 0) {
    for (int64_t r = 0; r < rows; ++r) data<float>(rstd)[r] = 1.0f / std::sqrt(float(eps));
    return;
  }
  const std::vector<float> weight = weight_as_float(w);
  for_row_bands(rows, cols, [&](int64_t begin, int64_t count) {
    if (residual) TE_SIMD_CALL(add)(row_dtype(x), row(x, begin), row(*residual, begin), count * cols, row(*h, begin));
    TE_SIMD_CALL(rms_norm_forward_rows)(row_dtype(x), row(residual ? *h : x, begin), count, cols, weight.data(), float(eps), row(y, begin),
                                        data<float>(rstd) + begin);
  });
}

void backward(const TensorView& dy, const TensorView* dh, const TensorView& h, const TensorView& w, const TensorView& rstd,
              const TensorView& dx, const TensorView& dw, const char* input) {
  check_common(h, w, rstd);
  check_same(dy, "dy", h, input);
  if (dh) check_same(*dh, "dh", h, input);
  check_same(dx, "dx", h, input);
  const int64_t rows = h.size(0), cols = h.size(1);
  check_f32(dw, "dw", {cols}, "the features of x");
  const std::vector<float> weight = weight_as_float(w);
  int64_t band = (rows + kMaxBands - 1) / kMaxBands;
  band = band < kMinBandRows ? kMinBandRows : band;
  const int64_t bands = (rows + band - 1) / band;
  std::vector<float> partial(bands * cols, 0.0f);
  parallel_for(bands, [&](int64_t b) {
    const int64_t begin = b * band, count = rows - begin < band ? rows - begin : band;
    TE_SIMD_CALL(rms_norm_backward_rows)(row_dtype(h), row(dy, begin), dh ? row(*dh, begin) : nullptr, row(h, begin), count, cols,
                                         weight.data(), data<float>(rstd) + begin, row(dx, begin), partial.data() + b * cols);
  });
  float* out = data<float>(dw);
  for (int64_t c = 0; c < cols; ++c) out[c] = 0;
  for (int64_t b = 0; b < bands; ++b) {
    for (int64_t c = 0; c < cols; ++c) out[c] += partial[b * cols + c];
  }
}

}  // namespace

// x[R, C], w[C] -> y[R, C] (dtype of x), rstd[R] f32
void rms_norm_forward(TensorView x, TensorView w, TensorView y, TensorView rstd, double eps) {
  forward(x, nullptr, w, y, nullptr, rstd, eps);
}

// x[R, C], residual[R, C], w[C] -> y[R, C], h[R, C] = x + residual (dtype of x), rstd[R] f32
void rms_norm_residual_forward(TensorView x, TensorView residual, TensorView w, TensorView y, TensorView h, TensorView rstd, double eps) {
  forward(x, &residual, w, y, &h, rstd, eps);
}

// dy[R, C], x[R, C], w[C], rstd[R] of the forward -> dx[R, C] (dtype of x), dw[C] f32
void rms_norm_backward(TensorView dy, TensorView x, TensorView w, TensorView rstd, TensorView dx, TensorView dw) {
  backward(dy, nullptr, x, w, rstd, dx, dw, "x");
}

// The same with dh[R, C], the gradient that reaches h[R, C] (what was normed) by other ways; dx is also that of the residual.
void rms_norm_residual_backward(TensorView dy, TensorView dh, TensorView h, TensorView w, TensorView rstd, TensorView dx, TensorView dw) {
  backward(dy, &dh, h, w, rstd, dx, dw, "h");
}

TE_EXPORT(rms_norm_forward);
TE_EXPORT(rms_norm_residual_forward);
TE_EXPORT(rms_norm_backward);
TE_EXPORT(rms_norm_residual_backward);

}  // namespace te
