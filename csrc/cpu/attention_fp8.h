// FP8 attention on the CPU: every operand and every product's input has the values that an FP8 kernel would have, the sums are
// FP32. It is the reference that faster FP8 kernels are compared with, and takes the same tiles as they do: P is quantised
// against its row's maximum with a constant scale, dS with one scale for 128 queries x 128 keys of a segment.
#pragma once

#include <cstdint>

#include "attention.h"

namespace te {

constexpr int64_t kFp8Tile = 128;  // queries and keys that share a scale of dS

// FP8 bytes [rows, heads, dim], innermost stride 1; value = decode(byte) * scale_inv[row * scale_row + head * scale_head].
struct AttentionFp8Tensor {
  const uint8_t* data = nullptr;
  int64_t row_stride = 0, head_stride = 0;
  const float* scale_inv = nullptr;
  int64_t scale_row = 0, scale_head = 0;
};

struct AttentionFp8Call {
  AttentionCall base;  // dtype is that of out, dq, dk, dv; q, k, v, dout are unused
  AttentionFp8Tensor q, k, v, dout;
  int64_t forward_format = 0, gradient_format = 0;  // of q, k, v, P; of dout, dS
  float p_scale = 256;
  bool rotated = false;  // q and k were rotated: rotate dq and dk back
};

// What attention_quantize does to the rows of a segment.
struct AttentionQuantizeCall {
  AttentionTensor x;
  AttentionDType dtype = AttentionDType::f32;
  int64_t heads = 0, dim = 0, format = 0;
  bool rotate = false;
  const double* means = nullptr;  // [segments, heads, dim] to subtract, or null
  uint8_t* data = nullptr;        // [rows, heads, dim]
  const float* scale = nullptr;
  int64_t scale_row = 0, scale_head = 0;
};

}  // namespace te

TE_SIMD_DECLARE(int64_t, attention_fp8_forward_scratch, (const AttentionFp8Call& call, int64_t chunks));
TE_SIMD_DECLARE(int64_t, attention_fp8_backward_scratch, (const AttentionFp8Call& call));
TE_SIMD_DECLARE(void, attention_fp8_forward_item,
                (const AttentionFp8Call& call, const AttentionSegment& segment, const AttentionForwardItem& item,
                 float* scratch));
TE_SIMD_DECLARE(void, attention_fp8_backward_item,
                (const AttentionFp8Call& call, const AttentionSegment& segment, const AttentionBackwardItem& item,
                 void (*wait)(const int64_t* progress, int64_t at_least), float* scratch));
TE_SIMD_DECLARE(void, attention_fp8_delta,
                (const AttentionFp8Call& call, const AttentionSegment& segment, int64_t row_begin, int64_t row_end,
                 float* scratch));
// dq = scale * dq_acc, rotated back where asked.
TE_SIMD_DECLARE(void, attention_fp8_dq_out,
                (const AttentionFp8Call& call, const AttentionSegment& segment, int64_t row_begin, int64_t row_end,
                 float* scratch));

// sums[heads, dim] of rows row_begin .. row_end - 1 of x.
TE_SIMD_DECLARE(void, attention_column_sums,
                (const AttentionQuantizeCall& call, int64_t row_begin, int64_t row_end, double* sums, float* scratch));
// amax[row, head] as the bits of a non-negative float, of the rows after centring and rotation; returns the number of values
// that are not finite. Rows are absolute.
TE_SIMD_DECLARE(int64_t, attention_quantize_amax,
                (const AttentionQuantizeCall& call, int64_t segment, int64_t row_begin, int64_t row_end, uint32_t* amax,
                 float* scratch));
TE_SIMD_DECLARE(void, attention_quantize_rows,
                (const AttentionQuantizeCall& call, int64_t segment, int64_t row_begin, int64_t row_end, float* scratch));
