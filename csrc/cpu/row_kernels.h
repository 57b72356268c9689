// The inner loops of RMSNorm, SwiGLU, rotary embedding and cross-entropy: rows of contiguous values, at every instruction-set level
// (simd.h). A sum over a row runs in 32 lanes that are added in one fixed tree, so its bits depend on neither level nor threads.
#pragma once

#include <cstdint>

#include "simd.h"

namespace te {

enum RowDtype : int { kRowF32 = 0, kRowBf16 = 1, kRowF16 = 2 };

}  // namespace te

// y = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps); x and y have one dtype.
TE_SIMD_DECLARE(void, rms_norm_forward_rows,
                (int dtype, const void* x, int64_t rows, int64_t cols, const float* w, float eps, void* y, float* rstd))
// dx (+ dh where it is given, before the rounding), and dw += sum over the rows, in order; dw[cols] belongs to this call.
TE_SIMD_DECLARE(void, rms_norm_backward_rows,
                (int dtype, const void* dy, const void* dh, const void* x, int64_t rows, int64_t cols, const float* w, const float* rstd,
                 void* dx, float* dw))
// sum[i] = a[i] + b[i], rounded to their dtype
TE_SIMD_DECLARE(void, add, (int dtype, const void* a, const void* b, int64_t n, void* sum))
// x[rows, 2*cols] = [gate | up], y[rows, cols]
TE_SIMD_DECLARE(void, swiglu_forward_rows, (int dtype, const void* x, int64_t rows, int64_t cols, void* y))
TE_SIMD_DECLARE(void, swiglu_backward_rows, (int dtype, const void* dy, const void* x, int64_t rows, int64_t cols, void* dx))
// Sine and cosine of position * inv_freq.
TE_SIMD_DECLARE(void, rope_angles, (int32_t position, const float* inv_freq, int64_t half, bool inverse, float* cosine, float* sine))
TE_SIMD_DECLARE(void, rope_head, (int dtype, const void* x, const float* cosine, const float* sine, int64_t half, void* y))
// loss and lse of one row; label -1: loss 0.
TE_SIMD_DECLARE(void, cross_entropy_forward_row, (int dtype, const void* logits, int64_t n, int64_t label, float* loss, float* lse))
TE_SIMD_DECLARE(void, cross_entropy_backward_row,
                (int dtype, float dloss, const void* logits, int64_t n, int64_t label, float lse, void* dlogits))
// to[i] = float(from[i])
TE_SIMD_DECLARE(void, widen, (int dtype, const void* from, int64_t n, float* to))
