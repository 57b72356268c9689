// What the attention functions of the CPU library share outside the kernels: the table of segments and its checks, the order of
// the work, scratch memory.
//
// q[Tq, H, D], k and v[Tk, G, D] hold segments one after another, perhaps with unused rows between and after them. Segment n has
// cu_q[n + 1] - cu_q[n] rows of q from row start_q[n] on, and likewise rows of k and v. Rows of no segment are never read; their
// outputs and gradients are 0 and their log-sum-exp is -inf.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "attention.h"
#include "tensor.h"

namespace te {

constexpr int64_t kMaxHeadDim = 256;

struct Range {
  int64_t begin, end;
};

struct Segments {
  std::vector<AttentionSegment> list;  // those that have rows of q or k
  std::vector<Range> q_gaps, k_gaps;   // rows of no segment
};

// Rows begin .. end - 1 of a segment's queries.
struct RowTask {
  const AttentionSegment* segment;
  int64_t begin, end;
};

// cu: cumulative lengths; start: first row of each segment; both int32[segments + 1]. ValueError unless every row that they name
// exists and belongs to one segment. Returns the number of segments.
int64_t check_segments(const TensorView& cu, const TensorView& start, int64_t rows, const char* cu_name, const char* start_name,
                       const char* rows_name);

// The segments of a call. mask: 0 none, 1 causal, 2 causal_top_left, 3 causal_bottom_right; left and right: -1 no limit.
Segments read_segments(const TensorView& cu_q, const TensorView& cu_k, const TensorView& start_q, const TensorView& start_k,
                       int64_t rows_q, int64_t rows_k, int64_t mask, int64_t left, int64_t right);

// [rows, heads, head dim of `like`] with innermost stride 1 on the CPU.
void check_rows(const TensorView& t, const char* name, const TensorView& like, int64_t rows, int64_t heads);

// lse float32[heads, rows] contiguous.
void check_lse(const TensorView& lse, int64_t heads, int64_t rows);

// The scratch of dq_accumulation 0 (fp32: [1, heads, rows, dim]) or 1 (bf16: [1, segments, heads, padded rows, 128]); the layout
// of the other one is refused.
void check_dq_accumulator(const TensorView& dq_acc, const TensorView& q, const Segments& segments, int64_t segment_count,
                          int64_t dq_accumulation);

float checked_scale(double scale);

inline AttentionTensor view(const TensorView& t) { return {data<void>(t), t.stride(0), t.stride(1)}; }

// 64-byte aligned memory of this thread that stays for the next call; the content is not kept.
float* thread_scratch(int64_t floats);

std::vector<RowTask> row_tasks(const Segments& segments);

// Ranges of queries of heads that share a kv head, the most expensive first. chunks: chunks of 32 queries in an item at most.
std::vector<AttentionForwardItem> forward_items(const Segments& segments, int64_t heads, int64_t kv_heads, int64_t chunks);

// Runs one task for each block of `block` keys and kv head. Blocks of a segment and kv head begin in order, and each one's task
// may wait (wait_for_progress) for the progress of the one before.
void run_backward(const Segments& segments, int64_t kv_heads, int64_t block,
                  const std::function<void(const AttentionSegment&, const AttentionBackwardItem&)>& task);

void wait_for_progress(const int64_t* progress, int64_t at_least);

// Sets whole rows of contiguous [rows, heads, dim] tensors to zero bytes, which is 0 in every dtype.
void zero_rows(const TensorView& t, const std::vector<Range>& gaps);

// Sets rows of lse[heads, rows] to -inf.
void clear_lse(float* lse, int64_t heads, int64_t rows, const std::vector<Range>& gaps);

}  // namespace te
