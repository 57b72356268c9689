// THD attention on the CPU: what the scheduler (attention.cpp) and the kernels (attention_*.simd.cpp) share.
//
// The work of one segment never depends on another one: rows are cut into chunks of 32 queries and keys into blocks counted from
// the segment's own first row, and every sum runs in that order. So a packed segment gives the bits that it gives alone, whatever
// the number of threads.
#pragma once

#include <cstdint>

#include "simd.h"

namespace te {

constexpr int64_t kQueryChunk = 32;       // queries that a tile holds, one a vector lane
constexpr int64_t kForwardKeys = 64;      // keys of a forward tile
constexpr int64_t kDqPaddedHeadDim = 128;  // row length of the bf16 dQ accumulator

enum class AttentionDType : int { f32 = 0, bf16 = 1, f16 = 2 };

// A [rows, heads, dim] view: strides in elements, innermost stride 1.
struct AttentionTensor {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// One segment. Query i sees keys max(0, i + shift - left) .. min(k_len - 1, i + shift + right).
struct AttentionSegment {
  int64_t q_start = 0, q_len = 0;
  int64_t k_start = 0, k_len = 0;
  int64_t shift = 0, left = 0, right = 0;
  int64_t index = 0;  // its number in cu_seqlens
};

struct AttentionCall {
  AttentionDType dtype = AttentionDType::f32;
  int64_t heads = 0, kv_heads = 0, dim = 0, rows_q = 0;
  float scale = 0;
  AttentionTensor q, k, v, out;
  float* lse = nullptr;  // [heads, rows_q], natural logarithm
  // Backward only.
  AttentionTensor dout, dq, dk, dv;
  float* delta = nullptr;  // [heads, rows_q], sum over dim of dout * out
  bool dq_bf16 = false;    // false: dq_acc float [heads, rows_q, dim]; true: bf16 [segments, heads, dq_rows, 128]
  void* dq_acc = nullptr;
  int64_t dq_rows = 0;
};

// A range of queries of some heads that share one kv head.
struct AttentionForwardItem {
  int64_t segment, head_begin, head_end, row_begin, row_end;
};

// One block of keys of one kv head, with all queries of its segment that see it. Blocks of a segment and kv head add to
// the same dQ rows in the order of their numbers: a block waits until `previous` (the progress of the block before it, or
// null) has passed a chunk, and tells its own progress.
struct AttentionBackwardItem {
  int64_t segment, kv_head, key_begin, key_end;
  const int64_t* previous;
  int64_t* progress;
};

// Keys of a backward block: fewer for long rows, so that K, V, dK and dV stay in the second-level cache.
constexpr int64_t attention_backward_keys(int64_t dim) { return dim <= 128 ? 128 : 64; }

// Vector rows are padded to this many floats.
constexpr int64_t attention_padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

}  // namespace te

// Floats of scratch that the items need; scratch is 64-byte aligned.
TE_SIMD_DECLARE(int64_t, attention_forward_scratch, (const AttentionCall& call, int64_t chunks));
TE_SIMD_DECLARE(int64_t, attention_backward_scratch, (const AttentionCall& call));
TE_SIMD_DECLARE(void, attention_forward_item,
                (const AttentionCall& call, const AttentionSegment& segment, const AttentionForwardItem& item, float* scratch));
TE_SIMD_DECLARE(void, attention_backward_item,
                (const AttentionCall& call, const AttentionSegment& segment, const AttentionBackwardItem& item,
                 void (*wait)(const int64_t* progress, int64_t at_least), float* scratch));
// delta[h, row] for the segment's rows row_begin .. row_end - 1.
TE_SIMD_DECLARE(void, attention_delta,
                (const AttentionCall& call, const AttentionSegment& segment, int64_t row_begin, int64_t row_end, float* scratch));
// dq = scale * dq_acc, the after-kernel ("convert" from the packed layout, "shuffle" from the one per segment).
TE_SIMD_DECLARE(void, attention_dq_out,
                (const AttentionCall& call, const AttentionSegment& segment, int64_t row_begin, int64_t row_end, float* scratch));
