// attention_forward and attention_backward of the CPU library: checks, the table of segments, and the order of the work.
//
// q[Tq, H, D], k and v[Tk, G, D] hold segments one after another, perhaps with unused rows between and after them. Segment n has
// cu_q[n + 1] - cu_q[n] rows of q from row start_q[n] on, and likewise rows of k and v. Rows of no segment are never read; their
// outputs and gradients are 0 and their log-sum-exp is -inf.
#include <algorithm>
#include <cmath>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "parallel.h"
#include "tensor.h"

namespace te {
namespace {

constexpr int64_t kMaxDim = 256;
constexpr int64_t kForwardChunks = 8;  // chunks of 32 queries that one forward item takes through the same keys
constexpr int64_t kRowsPerTask = 64;   // for tasks that only copy rows
constexpr int64_t kNoLimit = int64_t(1) << 40;

enum Mask : int64_t { kNone = 0, kCausal = 1, kCausalTopLeft = 2, kCausalBottomRight = 3 };

struct Range {
  int64_t begin, end;
};

struct Segments {
  std::vector<AttentionSegment> list;  // those that have rows of q or k
  std::vector<Range> q_gaps, k_gaps;   // rows of no segment
};

// ---- checks ---------------------------------------------------------------------------------------------------------

AttentionDType attention_dtype(const TensorView& t) {
  const DType d = dtype_of(t);
  return d == DType::f32 ? AttentionDType::f32 : d == DType::bf16 ? AttentionDType::bf16 : AttentionDType::f16;
}

void check_rows(const TensorView& t, const char* name, const TensorView& like, const char* like_name, int64_t rows,
                int64_t heads) {
  check_device(t, name, kDLCPU);
  check_rank(t, name, 3, "[rows, heads, head dim]");
  TE_CHECK(dtype_of(t) == dtype_of(like),
           name << " is " << describe(t) << "; expected the dtype of " << like_name << ", which is " << describe(like));
  check_shape(t, name, {rows, heads, like.size(2)}, "rows, heads, head dim");
  check_inner_contiguous(t, name);
}

void check_inputs(const TensorView& q, const TensorView& k, const TensorView& v) {
  check_device(q, "q", kDLCPU);
  check_rank(q, "q", 3, "[rows, heads, head dim]");
  check_dtype(q, "q", {DType::f32, DType::bf16, DType::f16});
  check_inner_contiguous(q, "q");
  check_rank(k, "k", 3, "[rows, kv heads, head dim]");
  const int64_t heads = q.size(1), kv_heads = k.size(1), dim = q.size(2);
  TE_CHECK(dim >= 1 && dim <= kMaxDim, "q is " << describe(q) << "; expected a head dim of 1 to " << kMaxDim);
  TE_CHECK(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0,
           "q has " << heads << " heads and k has " << kv_heads << "; expected a multiple of the kv heads");
  check_rows(k, "k", q, "q", k.size(0), kv_heads);
  check_rows(v, "v", q, "q", k.size(0), kv_heads);
}

void check_offsets(const TensorView& t, const char* name, int64_t size) {
  check_device(t, name, kDLCPU);
  check_rank(t, name, 1, "[segments + 1]");
  check_dtype(t, name, {DType::i32});
  TE_CHECK(t.size(0) >= 1, name << " is empty; expected segments + 1 numbers");
  TE_CHECK(t.size(0) == size, name << " has " << t.size(0) << " numbers; expected " << size << ", as many as cu_q has");
  check_contiguous(t, name);
}

// cu: cumulative lengths; start: first row of each segment. Every row that they name must exist and belong to one segment.
void check_table(const int32_t* cu, const int32_t* start, int64_t segments, int64_t rows, const char* cu_name,
                 const char* start_name, const char* rows_name) {
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
}

Segments read_segments(const TensorView& cu_q, const TensorView& cu_k, const TensorView& start_q, const TensorView& start_k,
                       int64_t rows_q, int64_t rows_k, int64_t mask, int64_t left, int64_t right) {
  const int64_t segments = cu_q.ndim() == 1 ? cu_q.size(0) - 1 : 0;
  check_offsets(cu_q, "cu_q", segments + 1);
  check_offsets(cu_k, "cu_k", segments + 1);
  check_offsets(start_q, "start_q", segments + 1);
  check_offsets(start_k, "start_k", segments + 1);
  TE_CHECK(mask >= kNone && mask <= kCausalBottomRight,
           "mask is " << mask << "; expected 0 (none), 1 (causal), 2 (causal_top_left) or 3 (causal_bottom_right)");
  TE_CHECK(left >= -1 && right >= -1, "window is (" << left << ", " << right << "); expected -1 (no limit) or more");
  const int32_t* q_lengths = data<const int32_t>(cu_q);
  const int32_t* k_lengths = data<const int32_t>(cu_k);
  const int32_t* q_starts = data<const int32_t>(start_q);
  const int32_t* k_starts = data<const int32_t>(start_k);
  check_table(q_lengths, q_starts, segments, rows_q, "cu_q", "start_q", "q");
  check_table(k_lengths, k_starts, segments, rows_k, "cu_k", "start_k", "k");

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

// ---- work -----------------------------------------------------------------------------------------------------------

AttentionTensor view(const TensorView& t) { return {data<void>(t), t.stride(0), t.stride(1)}; }

AttentionCall make_call(const TensorView& q, const TensorView& k, const TensorView& v, double scale) {
  TE_CHECK(std::isfinite(scale), "scale is " << scale << "; expected a finite number");
  AttentionCall call;
  call.dtype = attention_dtype(q);
  call.rows_q = q.size(0);
  call.heads = q.size(1);
  call.kv_heads = k.size(1);
  call.dim = q.size(2);
  call.scale = float(scale);
  call.q = view(q);
  call.k = view(k);
  call.v = view(v);
  return call;
}

// Memory of this thread that stays for the next call; the content is not kept.
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

// Pairs of queries and keys of rows row_begin .. row_end - 1, about: what an item costs.
double pairs(const AttentionSegment& s, int64_t row_begin, int64_t row_end) {
  const auto seen = [&](int64_t row) {
    const int64_t first = std::max<int64_t>(0, row + s.shift - s.left), last = std::min(s.k_len - 1, row + s.shift + s.right);
    return double(std::max<int64_t>(0, last - first + 1));
  };
  return 0.5 * (seen(row_begin) + seen(row_end - 1)) * double(row_end - row_begin);
}

struct RowTask {
  const AttentionSegment* segment;
  int64_t begin, end;
};

std::vector<RowTask> row_tasks(const Segments& segments) {
  std::vector<RowTask> tasks;
  for (const AttentionSegment& s : segments.list) {
    for (int64_t row = 0; row < s.q_len; row += kRowsPerTask) tasks.push_back({&s, row, std::min(s.q_len, row + kRowsPerTask)});
  }
  return tasks;
}

// Fills whole rows of contiguous [rows, heads, dim] tensors with zero bytes, which is 0 in every dtype.
void zero_rows(const TensorView& t, const std::vector<Range>& gaps) {
  const int64_t bytes = t.size(1) * t.size(2) * (t.dtype().bits / 8);
  for (const Range& gap : gaps) std::fill_n(data<char>(t) + gap.begin * bytes, (gap.end - gap.begin) * bytes, char(0));
}

void wait_for(const int64_t* progress, int64_t at_least) {
  for (int spin = 0; __atomic_load_n(progress, __ATOMIC_ACQUIRE) < at_least; ++spin) {
    if (spin > 1000) std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

void attention_forward(TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView cu_k, TensorView start_q,
                       TensorView start_k, TensorView out, TensorView lse, int64_t mask, int64_t left, int64_t right,
                       double scale) {
  check_inputs(q, k, v);
  check_rows(out, "out", q, "q", q.size(0), q.size(1));
  check_contiguous(out, "out");
  check_device(lse, "lse", kDLCPU);
  check_dtype(lse, "lse", {DType::f32});
  check_shape(lse, "lse", {q.size(1), q.size(0)}, "heads, rows of q");
  check_contiguous(lse, "lse");
  const Segments segments = read_segments(cu_q, cu_k, start_q, start_k, q.size(0), k.size(0), mask, left, right);
  AttentionCall call = make_call(q, k, v, scale);
  call.out = view(out);
  call.lse = data<float>(lse);

  // An item takes several heads of one kv head through the same keys where it can, and else more rows.
  const int64_t group = call.heads / call.kv_heads;
  const int64_t heads_per_item = std::min<int64_t>(group, kForwardChunks / 2);
  const int64_t rows_per_item = kForwardChunks / heads_per_item * kQueryChunk;
  struct Costed {
    double cost;
    AttentionForwardItem item;
  };
  std::vector<Costed> items;
  for (size_t n = 0; n < segments.list.size(); ++n) {
    const AttentionSegment& s = segments.list[n];
    for (int64_t row = 0; row < s.q_len; row += rows_per_item) {
      const int64_t row_end = std::min(s.q_len, row + rows_per_item);
      for (int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
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
  const auto run = TE_SIMD_CALL(attention_forward_item);
  const int64_t floats = TE_SIMD_CALL(attention_forward_scratch)(call, kForwardChunks);
  parallel_for(int64_t(items.size()), [&](int64_t i) {
    const AttentionForwardItem& item = items[i].item;
    run(call, segments.list[item.segment], item, thread_scratch(floats));
  });
  zero_rows(out, segments.q_gaps);
  for (int64_t head = 0; head < call.heads; ++head) {
    for (const Range& gap : segments.q_gaps) {
      std::fill(call.lse + head * call.rows_q + gap.begin, call.lse + head * call.rows_q + gap.end, -INFINITY);
    }
  }
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

void attention_backward(TensorView dout, TensorView q, TensorView k, TensorView v, TensorView out, TensorView lse,
                        TensorView cu_q, TensorView cu_k, TensorView start_q, TensorView start_k, TensorView dq,
                        TensorView dk, TensorView dv, TensorView dq_acc, int64_t mask, int64_t left, int64_t right,
                        double scale, int64_t dq_accumulation) {
  check_inputs(q, k, v);
  check_rows(dout, "dout", q, "q", q.size(0), q.size(1));
  check_rows(out, "out", q, "q", q.size(0), q.size(1));
  check_device(lse, "lse", kDLCPU);
  check_dtype(lse, "lse", {DType::f32});
  check_shape(lse, "lse", {q.size(1), q.size(0)}, "heads, rows of q");
  check_contiguous(lse, "lse");
  check_rows(dq, "dq", q, "q", q.size(0), q.size(1));
  check_rows(dk, "dk", q, "q", k.size(0), k.size(1));
  check_rows(dv, "dv", q, "q", k.size(0), k.size(1));
  check_contiguous(dq, "dq");
  check_contiguous(dk, "dk");
  check_contiguous(dv, "dv");
  const Segments segments = read_segments(cu_q, cu_k, start_q, start_k, q.size(0), k.size(0), mask, left, right);
  check_dq_accumulator(dq_acc, q, segments, cu_q.size(0) - 1, dq_accumulation);

  AttentionCall call = make_call(q, k, v, scale);
  std::vector<float> delta(size_t(call.heads * call.rows_q));
  call.out = view(out);
  call.dout = view(dout);
  call.dq = view(dq);
  call.dk = view(dk);
  call.dv = view(dv);
  call.lse = data<float>(lse);
  call.delta = delta.data();
  call.dq_bf16 = dq_accumulation == 1;
  call.dq_acc = data<void>(dq_acc);
  call.dq_rows = call.dq_bf16 ? dq_acc.size(3) : 0;

  const std::vector<RowTask> rows = row_tasks(segments);
  const int64_t row_floats = 2 * attention_padded_dim(call.dim);
  parallel_for(int64_t(rows.size()), [&](int64_t i) {
    TE_SIMD_CALL(attention_delta)(call, *rows[i].segment, rows[i].begin, rows[i].end, thread_scratch(row_floats));
  });

  struct Costed {
    double cost;
    AttentionBackwardItem item;
  };
  std::vector<Costed> items;
  const int64_t block = attention_backward_keys(call.dim);
  for (size_t n = 0; n < segments.list.size(); ++n) {
    const AttentionSegment& s = segments.list[n];
    for (int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
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
  const auto run = TE_SIMD_CALL(attention_backward_item);
  const int64_t floats = TE_SIMD_CALL(attention_backward_scratch)(call);
  // Tasks are begun in order, so the block that one waits for has been begun by a thread before.
  parallel_for(int64_t(items.size()), [&](int64_t i) {
    const Finish finish{items[i].item.progress};
    run(call, segments.list[items[i].item.segment], items[i].item, wait_for, thread_scratch(floats));
  });
  parallel_for(int64_t(rows.size()), [&](int64_t i) {
    TE_SIMD_CALL(attention_dq_out)(call, *rows[i].segment, rows[i].begin, rows[i].end, thread_scratch(row_floats));
  });
  zero_rows(dq, segments.q_gaps);
  zero_rows(dk, segments.k_gaps);
  zero_rows(dv, segments.k_gaps);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_forward, attention_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_backward, attention_backward);

}  // namespace
}  // namespace te
