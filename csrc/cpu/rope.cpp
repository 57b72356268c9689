// Rotary embedding by positions: pairs (i, i + D/2) turned by position * inv_freq[i], an FP32 product; inverse turns back, which is
// the gradient. A token's sines and cosines are made once for all its heads.
#include <vector>

#include "export.h"
#include "row_kernels.h"
#include "rows.h"
#include "tensor.h"

namespace te {

// x[T, H, D] (innermost stride 1), positions[T] i32, inv_freq[D/2] f32 -> y[T, H, D] contiguous, dtype of x
void rope(TensorView x, TensorView positions, TensorView inv_freq, TensorView y, int64_t inverse) {
  check_device(x, "x", kDLCPU);
  check_dtype(x, "x", {DType::f32, DType::bf16, DType::f16});
  check_rank(x, "x", 3, "[T, H, D]");
  check_inner_contiguous(x, "x");
  const int64_t tokens = x.size(0), heads = x.size(1), dim = x.size(2), half = dim / 2;
  TE_CHECK(dim % 2 == 0, "x is " << describe(x) << "; expected an even head dimension, pairs are (i, i + D/2)");
  check_device(positions, "positions", kDLCPU);
  check_dtype(positions, "positions", {DType::i32});
  check_shape(positions, "positions", {tokens}, "the tokens of x");
  check_contiguous(positions, "positions");
  check_f32(inv_freq, "inv_freq", {half}, "half the head dimension of x");
  check_dtype_of(y, "y", x, "x");
  check_shape(y, "y", {tokens, heads, dim}, "the shape of x");
  check_contiguous(y, "y");
  TE_CHECK(inverse == 0 || inverse == 1, "inverse is " << inverse << "; expected 0 or 1");
  if (x.numel() == 0) return;

  const int64_t size = float_size(x), token_stride = x.stride(0) * size, head_stride = x.stride(1) * size;
  for_row_bands(tokens, heads * dim, [&](int64_t begin, int64_t count) {
    std::vector<float> cosine(half), sine(half);
    for (int64_t t = begin; t < begin + count; ++t) {
      TE_SIMD_CALL(rope_angles)(data<int32_t>(positions)[t], data<float>(inv_freq), half, inverse == 1, cosine.data(), sine.data());
      for (int64_t h = 0; h < heads; ++h) {
        TE_SIMD_CALL(rope_head)(row_dtype(x), data<char>(x) + t * token_stride + h * head_stride, cosine.data(), sine.data(), half,
                                data<char>(y) + (t * heads + h) * dim * size);
      }
    }
  });
}

TE_EXPORT(rope);

}  // namespace te
