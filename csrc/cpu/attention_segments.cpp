// The table of segments, the order of the work and the scratch memory of attention (attention_segments.h).
#include "attention_segments.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <thread>

#include "parallel.h"

namespace te {
namespace {

constexpr int64_t kRowsPerTask = 64;  // for tasks that only copy rows
constexpr int64_t kNoLimit = int64_t(1) << 40;

enum Mask : int64_t { kNone = 0, kCausal = 1, kCausalTopLeft = 2, kCausalBottomRight = 3 };

void check_offsets(const TensorView& t, const char* name) {
  check_device(t, name, kDLCPU);
  check_rank(t, name, 1, "[segments + 1]");
  check_dtype(t, name, {DType::i32});
  TE_CHECK(t.size(0) >= 1, name << " is empty; expected segments + 1 numbers");
  check_contiguous(t, name);
}

// Pairs of queries and keys of rows row_begin .. row_end - 1, about: what an item costs.
double pairs(const AttentionSegment& s, int64_t row_begin, int64_t row_end) {
  const auto seen = [&](int64_t row) {
    const int64_t first = std::max<int64_t>(0, row + s.shift - s.left), last = std::min(s.k_len - 1, row + s.shift + s.right);
    return double(std::max<int64_t>(0, last - first + 1));
  };
  return 0.5 * (seen(row_begin) + seen(row_end - 1)) * double(row_end - row_begin);
}

}  // namespace

int64_t check_segments(const TensorView& cu_tensor, const TensorView& start_tensor, int64_t rows, const char* cu_name,
                       const char* start_name, const char* rows_name) {
  check_offsets(cu_tensor, cu_name);
  check_offsets(start_tensor, start_name);
  TE_CHECK(start_tensor.size(0) == cu_tensor.size(0), start_name << " has " << start_tensor.size(0) << " numbers; expected "
                                                                 << cu_tensor.size(0) << ", as many as " << cu_name << " has");
  const int32_t* cu = data<const int32_t>(cu_tensor);
  const int32_t* start = data<const int32_t>(start_tensor);
  const int64_t segments = cu_tensor.size(0) - 1;
  TE_CHECK(cu[0] == 0, cu_name << "[0] is " << cu[0] << "; expected 0");
  TE_CHECK(start[0] >= 0, start_name << "[0] is " << start[0] << "; expected 0 or more");
  for (int64_t n = 0; n < segments; ++n) {
    TE_CHECK(cu[n + 1] >= cu[n], cu_name << " decreases from " << cu[n] << " to " << cu[n + 1] << " at index " << n + 1
                                         << "; expected cumulative lengths");
  }
  TE_CHECK(cu[segments] <= rows,
           cu_name << " ends with " << cu[segments] << " but " << rows_name << " has " << rows << " rows");
  for (int64_t n = 0; n < segments; ++n) {
    const int64_t length = int64_t(cu[n + 1]) - cu[n];
    TE_CHECK(start[n + 1] >= start[n] && (length == 0 || start[n] + length <= start[n + 1]),
             "segment " << n << " has " << length << " rows from row " << start[n] << " on, but " << start_name << "["
                        << n + 1 << "] is " << start[n + 1] << "; expected segments in order that do not overlap");
  }
  TE_CHECK(start[segments] <= rows,
           start_name << " ends with " << start[segments] << " but " << rows_name << " has " << rows << " rows");
  return segments;
}

Segments read_segments(const TensorView& cu_q, const TensorView& cu_k, const TensorView& start_q, const TensorView& start_k,
                       int64_t rows_q, int64_t rows_k, int64_t mask, int64_t left, int64_t right) {
  const int64_t segments = check_segments(cu_q, start_q, rows_q, "cu_seqlens_q", "cu_seqlens_q_padded", "q");
  const int64_t kv_segments = check_segments(cu_k, start_k, rows_k, "cu_seqlens_kv", "cu_seqlens_kv_padded", "k");
  TE_CHECK(kv_segments == segments,
           "cu_seqlens_kv has " << kv_segments + 1 << " numbers; expected " << segments + 1 << ", as many as cu_seqlens_q has");
  TE_CHECK(mask >= kNone && mask <= kCausalBottomRight,
           "mask is " << mask << "; expected 0 (none), 1 (causal), 2 (causal_top_left) or 3 (causal_bottom_right)");
  TE_CHECK(left >= -1 && right >= -1, "window is (" << left << ", " << right << "); expected -1 (no limit) or more");
  const int32_t* q_lengths = data<const int32_t>(cu_q);
  const int32_t* k_lengths = data<const int32_t>(cu_k);
  const int32_t* q_starts = data<const int32_t>(start_q);
  const int32_t* k_starts = data<const int32_t>(start_k);

  left = left < 0 ? kNoLimit : std::min(left, kNoLimit);
  right = right < 0 ? kNoLimit : std::min(right, kNoLimit);
  if (mask != kNone) right = 0;
  Segments result;
  int64_t q_end = 0, k_end = 0;
  for (int64_t n = 0; n < segments; ++n) {
    AttentionSegment s;
    s.index = n;
    s.q_start = q_starts[n];
    s.k_start = k_starts[n];
    s.q_len = q_lengths[n + 1] - q_lengths[n];
    s.k_len = k_lengths[n + 1] - k_lengths[n];
    s.shift = mask == kCausalBottomRight ? s.k_len - s.q_len : 0;
    s.left = left;
    s.right = right;
    TE_CHECK(mask != kCausal || s.q_len == s.k_len,
             "mask causal needs equal q and kv lengths, but segment " << n << " has " << s.q_len << " and " << s.k_len
                                                                       << "; ask for causal_top_left or causal_bottom_right");
    if (s.q_len > 0) {
      if (s.q_start > q_end) result.q_gaps.push_back({q_end, s.q_start});
      q_end = s.q_start + s.q_len;
    }
    if (s.k_len > 0) {
      if (s.k_start > k_end) result.k_gaps.push_back({k_end, s.k_start});
      k_end = s.k_start + s.k_len;
    }
    if (s.q_len > 0 || s.k_len > 0) result.list.push_back(s);
  }
  if (q_end < rows_q) result.q_gaps.push_back({q_end, rows_q});
  if (k_end < rows_k) result.k_gaps.push_back({k_end, rows_k});
  return result;
}

void check_rows(const TensorView& t, const char* name, const TensorView& like, int64_t rows, int64_t heads) {
  check_device(t, name, kDLCPU);
  check_rank(t, name, 3, "[rows, heads, head dim]");
  check_shape(t, name, {rows, heads, like.size(2)}, "rows, heads, head dim");
  check_inner_contiguous(t, name);
}

void check_lse(const TensorView& lse, int64_t heads, int64_t rows) {
  check_device(lse, "lse", kDLCPU);
  check_dtype(lse, "lse", {DType::f32});
  check_shape(lse, "lse", {heads, rows}, "heads, rows of q");
  check_contiguous(lse, "lse");
}

void check_dq_accumulator(const TensorView& dq_acc, const TensorView& q, const Segments& segments, int64_t segment_count,
                          int64_t dq_accumulation) {
  TE_CHECK(dq_accumulation == 0 || dq_accumulation == 1,
           "dq_accumulation is " << dq_accumulation << "; expected 0 (fp32) or 1 (bf16)");
  check_device(dq_acc, "dq_acc", kDLCPU);
  check_contiguous(dq_acc, "dq_acc");
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2);
  if (dq_accumulation == 0) {
    check_dtype(dq_acc, "dq_acc of dq_accumulation fp32", {DType::f32});
    check_shape(dq_acc, "dq_acc of dq_accumulation fp32", {1, heads, rows, dim}, "1, heads, rows of q, head dim");
    return;
  }
  TE_CHECK(dim <= kDqPaddedHeadDim, "dq_accumulation bf16 holds rows of " << kDqPaddedHeadDim << ", but the head dim is "
                                                                           << dim << "; use dq_accumulation fp32");
  check_dtype(dq_acc, "dq_acc of dq_accumulation bf16", {DType::bf16});
  check_rank(dq_acc, "dq_acc of dq_accumulation bf16", 5, "[1, segments, heads, padded rows of a segment, 128]");
  const int64_t padded = dq_acc.size(3);
  check_shape(dq_acc, "dq_acc of dq_accumulation bf16", {1, segment_count, heads, padded, kDqPaddedHeadDim},
              "1, segments, heads, padded rows of a segment, 128");
  int64_t longest = 0;
  for (const AttentionSegment& s : segments.list) longest = std::max(longest, s.q_len);
  TE_CHECK(padded % 16 == 0 && padded >= longest,
           "dq_acc of dq_accumulation bf16 holds " << padded << " rows a segment; the longest segment has " << longest
                                                   << ", expected at least that many and a multiple of 16");
}

float checked_scale(double scale) {
  TE_CHECK(std::isfinite(scale), "scale is " << scale << "; expected a finite number");
  return float(scale);
}

float* thread_scratch(int64_t floats) {
  struct Buffer {
    float* memory = nullptr;
    int64_t size = 0;
    ~Buffer() { ::operator delete(memory, std::align_val_t(64)); }
  };
  thread_local Buffer buffer;
  if (buffer.size < floats) {
    ::operator delete(buffer.memory, std::align_val_t(64));
    buffer.memory = nullptr;
    buffer.size = 0;
    buffer.memory = static_cast<float*>(::operator new(size_t(floats) * sizeof(float), std::align_val_t(64)));
    buffer.size = floats;
  }
  return buffer.memory;
}

std::vector<RowTask> row_tasks(const Segments& segments) {
  std::vector<RowTask> tasks;
  for (const AttentionSegment& s : segments.list) {
    for (int64_t row = 0; row < s.q_len; row += kRowsPerTask) tasks.push_back({&s, row, std::min(s.q_len, row + kRowsPerTask)});
  }
  return tasks;
}

std::vector<AttentionForwardItem> forward_items(const Segments& segments, int64_t heads, int64_t kv_heads, int64_t chunks) {
  // An item takes several heads of one kv head through the same keys where it can, and else more rows.
  const int64_t group = heads / kv_heads;
  const int64_t heads_per_item = std::min<int64_t>(group, chunks / 2);
  const int64_t rows_per_item = chunks / heads_per_item * kQueryChunk;
  struct Costed {
    double cost;
    AttentionForwardItem item;
  };
  std::vector<Costed> items;
  for (size_t n = 0; n < segments.list.size(); ++n) {
    const AttentionSegment& s = segments.list[n];
    for (int64_t row = 0; row < s.q_len; row += rows_per_item) {
      const int64_t row_end = std::min(s.q_len, row + rows_per_item);
      for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
        for (int64_t head = 0; head < group; head += heads_per_item) {
          const int64_t head_end = std::min(group, head + heads_per_item), base = kv_head * group;
          const double cost = pairs(s, row, row_end) * double(head_end - head);
          items.push_back({cost, {int64_t(n), base + head, base + head_end, row, row_end}});
        }
      }
    }
  }
  // Long items first, so that no thread starts one when the others have ended.
  std::stable_sort(items.begin(), items.end(), [](const Costed& a, const Costed& b) { return a.cost > b.cost; });
  std::vector<AttentionForwardItem> result;
  result.reserve(items.size());
  for (const Costed& entry : items) result.push_back(entry.item);
  return result;
}

void run_backward(const Segments& segments, int64_t kv_heads, int64_t block,
                  const std::function<void(const AttentionSegment&, const AttentionBackwardItem&)>& task) {
  struct Costed {
    double cost;
    AttentionBackwardItem item;
  };
  std::vector<Costed> items;
  for (size_t n = 0; n < segments.list.size(); ++n) {
    const AttentionSegment& s = segments.list[n];
    for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      double cost = 1e300;
      for (int64_t key = 0; key < s.k_len; key += block) {
        const int64_t key_end = std::min(s.k_len, key + block);
        // Queries that see the block.
        const int64_t first = std::max<int64_t>(0, key - s.shift - s.right);
        const int64_t last = std::min(s.q_len - 1, key_end - 1 - s.shift + s.left);
        // Never more than the block before: sorting must keep the order in which blocks wait for each other.
        cost = std::min(cost, double(std::max<int64_t>(0, last - first + 1)) * double(key_end - key));
        items.push_back({cost, {int64_t(n), kv_head, key, key_end, nullptr, nullptr}});
      }
    }
  }
  constexpr int64_t kStride = 8;  // a cache line each
  std::vector<int64_t> progress(items.size() * kStride, 0);
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].item.progress = &progress[i * kStride];
    if (items[i].item.key_begin > 0) items[i].item.previous = &progress[(i - 1) * kStride];
  }
  std::stable_sort(items.begin(), items.end(), [](const Costed& a, const Costed& b) { return a.cost > b.cost; });

  // Ends a block's progress however its task ends, so that no other block waits for ever.
  struct Finish {
    int64_t* progress;
    ~Finish() { __atomic_store_n(progress, INT64_MAX, __ATOMIC_RELEASE); }
  };
  // Tasks are begun in order, so the block that one waits for has been begun by a thread before.
  parallel_for(int64_t(items.size()), [&](int64_t i) {
    const Finish finish{items[i].item.progress};
    task(segments.list[items[i].item.segment], items[i].item);
  });
}

void wait_for_progress(const int64_t* progress, int64_t at_least) {
  for (int64_t spin = 0; __atomic_load_n(progress, __ATOMIC_ACQUIRE) < at_least; ++spin) {
    if (spin > 1000) std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

void zero_rows(const TensorView& t, const std::vector<Range>& gaps) {
  const int64_t bytes = t.size(1) * t.size(2) * (t.dtype().bits / 8);
  for (const Range& gap : gaps) std::fill_n(data<char>(t) + gap.begin * bytes, (gap.end - gap.begin) * bytes, char(0));
}

void clear_lse(float* lse, int64_t heads, int64_t rows, const std::vector<Range>& gaps) {
  for (int64_t head = 0; head < heads; ++head) {
    for (const Range& gap : gaps) std::fill(lse + head * rows + gap.begin, lse + head * rows + gap.end, -INFINITY);
  }
}

}  // namespace te
