// SwiGLU: y = silu(gate) * up for x = [gate | up], FP32 inside.
#include "export.h"
#include "row_kernels.h"
#include "rows.h"
#include "tensor.h"

namespace te {
namespace {

void check_half(const TensorView& t, const char* name, const TensorView& x) {
  check_dtype_of(t, name, x, "x");
  check_shape(t, name, {x.size(0), x.size(1) / 2}, "half the columns of x, which holds gate and up");
  check_contiguous(t, name);
}

void check_gate_up(const TensorView& x) {
  check_rows(x, "x", 2, "[R, 2C]");
  TE_CHECK(x.size(1) % 2 == 0, "x is " << describe(x) << "; expected an even number of columns, [gate | up]");
}

}  // namespace

// x[R, 2C] -> y[R, C]
void swiglu_forward(TensorView x, TensorView y) {
  check_gate_up(x);
  check_half(y, "y", x);
  const int64_t cols = x.size(1) / 2;
  for_row_bands(cols == 0 ? 0 : x.size(0), cols, [&](int64_t begin, int64_t count) {
    TE_SIMD_CALL(swiglu_forward_rows)(row_dtype(x), row(x, begin), count, cols, row(y, begin));
  });
}

// dy[R, C], x[R, 2C] -> dx[R, 2C]
void swiglu_backward(TensorView dy, TensorView x, TensorView dx) {
  check_gate_up(x);
  check_half(dy, "dy", x);
  check_same(dx, "dx", x, "x");
  const int64_t cols = x.size(1) / 2;
  for_row_bands(cols == 0 ? 0 : x.size(0), cols, [&](int64_t begin, int64_t count) {
    TE_SIMD_CALL(swiglu_backward_rows)(row_dtype(x), row(dy, begin), row(x, begin), count, cols, row(dx, begin));
  });
}

TE_EXPORT(swiglu_forward);
TE_EXPORT(swiglu_backward);

}  // namespace te
