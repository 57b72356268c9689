// The inner loops of quantise and dequantise: tiles of a row-major matrix, at every instruction-set level (simd.h).
//
// x[rows, cols] has `ld` elements from row to row. An amax is kept as the bits of a non-negative float: as integers these order
// finite < infinity < NaN, so an integer maximum is exact, drops no NaN and needs no order of evaluation.
#pragma once

#include <cstdint>

#include "simd.h"

namespace te {

struct Matrix {
  const void* x;
  int dtype;  // MatrixDtype
  int64_t ld;
};

enum MatrixDtype : int { kF32 = 0, kBf16 = 1, kF16 = 2 };

constexpr int64_t kMostCols = 512;  // of a tile whose columns have scales of their own

}  // namespace te

// out[r, g] = amax bits of row r, columns g*group .. (g+1)*group - 1; out has ceil(cols/group) columns.
TE_SIMD_DECLARE(void, amax_rows, (Matrix m, int64_t rows, int64_t cols, int64_t group, uint32_t* out))
// amax_rows, and out_cols[c] = amax bits of column c, from one reading. group is 32, 128 or cols; cols is at most kMostCols.
TE_SIMD_DECLARE(void, amax_both, (Matrix m, int64_t rows, int64_t cols, int64_t group, uint32_t* out, uint32_t* out_cols))
// scale[i], scale_inv[i] of amax[i], and the maximum of amax.
TE_SIMD_DECLARE(uint32_t, scales_from_amax,
                (const uint32_t* amax, int64_t n, float max, bool pow2, float* scale, float* scale_inv))
TE_SIMD_DECLARE(int64_t, count_nonfinite, (Matrix m, int64_t rows, int64_t cols))
// out[r, c] = encode(x[r, c] * scales[r * scale_ld + c / group]), r and c counted from the corner of m; the same bytes into `kept`
// unless that is null. ahead: while a row is encoded, the row that many rows further is fetched (0: none). clean: no product is NaN or
// above the format's maximum. stream: `out` is written past the caches, where the addresses allow it; such writes are ordered with
// nothing else before a store fence. `kept` is written as usual.
TE_SIMD_DECLARE(void, encode_rows,
                (Matrix m, int64_t rows, int64_t cols, const float* scales, int64_t scale_ld, int64_t group, int64_t format,
                 bool clean, int64_t ahead, uint8_t* out, int64_t out_ld, uint8_t* kept, int64_t kept_ld, bool stream))
// encode_rows, and out_cols[r, c] = encode(x[r, c] * col_scales[c]), from one reading. group is 32, 128 or cols; cols is at most
// kMostCols. stream is for `out`.
TE_SIMD_DECLARE(void, encode_both,
                (Matrix m, int64_t rows, int64_t cols, const float* scales, int64_t scale_ld, int64_t group, const float* col_scales,
                 int64_t format, bool clean, int64_t ahead, uint8_t* out, int64_t out_ld, uint8_t* out_cols, int64_t out_cols_ld,
                 bool stream))
// out[c, r] = in[r, c]
TE_SIMD_DECLARE(void, transpose_bytes,
                (const uint8_t* in, int64_t in_ld, int64_t rows, int64_t cols, uint8_t* out, int64_t out_ld))
// out[r, c] = in[r, c] for n bytes a row. stream: past the caches, where the addresses allow it; such writes are ordered with nothing
// else before a store fence.
TE_SIMD_DECLARE(void, copy_rows,
                (const uint8_t* in, int64_t in_ld, int64_t rows, int64_t n, uint8_t* out, int64_t out_ld, bool stream))
// y[c] = decode(in[c]) * scales[c / group], c < cols; y is float32 or bfloat16.
TE_SIMD_DECLARE(void, decode_row,
                (const uint8_t* in, int64_t cols, const float* scales, int64_t group, int64_t format, void* y, int y_dtype))
