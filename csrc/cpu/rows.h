// What the row-wise ops share: checks of contiguous float tensors, addresses of rows, and bands of rows as tasks.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "parallel.h"
#include "row_kernels.h"
#include "tensor.h"

namespace te {

inline int row_dtype(const TensorView& t) {
  return dtype_of(t) == DType::f32 ? kRowF32 : dtype_of(t) == DType::bf16 ? kRowBf16 : kRowF16;
}

inline int64_t float_size(const TensorView& t) { return dtype_of(t) == DType::f32 ? 4 : 2; }

// Address of row r of a contiguous [R, C] tensor.
inline char* row(const TensorView& t, int64_t r) { return data<char>(t) + r * t.size(1) * float_size(t); }

inline void check_rows(const TensorView& t, const char* name, int rank, const char* shape_text) {
  check_device(t, name, kDLCPU);
  check_dtype(t, name, {DType::f32, DType::bf16, DType::f16});
  check_rank(t, name, rank, shape_text);
  check_contiguous(t, name);
}

inline void check_f32(const TensorView& t, const char* name, std::initializer_list<int64_t> shape, const char* why) {
  check_device(t, name, kDLCPU);
  check_dtype(t, name, {DType::f32});
  check_shape(t, name, shape, why);
  check_contiguous(t, name);
}

inline void check_dtype_of(const TensorView& t, const char* name, const TensorView& like, const char* like_name) {
  check_device(t, name, kDLCPU);
  TE_CHECK(dtype_of(t) == dtype_of(like),
           name << " is " << describe(t) << "; expected dtype " << dtype_name(dtype_of(like)) << " (that of " << like_name << ")");
}

// Dtype and shape of another [R, C] tensor, contiguous.
inline void check_same(const TensorView& t, const char* name, const TensorView& like, const char* like_name) {
  check_dtype_of(t, name, like, like_name);
  const std::string why = std::string("the shape of ") + like_name;
  check_shape(t, name, {like.size(0), like.size(1)}, why.c_str());
  check_contiguous(t, name);
}

// body(first row, rows) over bands of about 32k elements.
template <typename F>
void for_row_bands(int64_t rows, int64_t cols, const F& body) {
  const int64_t band = cols >= 32768 ? 1 : cols <= 0 ? rows : (32768 + cols - 1) / cols;
  if (rows <= 0) return;
  parallel_for((rows + band - 1) / band, [&](int64_t b) {
    const int64_t begin = b * band;
    body(begin, rows - begin < band ? rows - begin : band);
  });
}

}  // namespace te
