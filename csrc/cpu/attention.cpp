// attention_forward and attention_backward of the CPU library, for FP32, BF16 and FP16 tensors.
//
// Layout of packed segments and what rows outside of them give: attention_segments.h.
#include <vector>

#include "attention.h"
#include "attention_segments.h"
#include "export.h"
#include "parallel.h"
#include "tensor.h"

namespace te {
namespace {

constexpr int64_t kForwardChunks = 8;  // chunks of 32 queries that one forward item takes through the same keys

AttentionDType attention_dtype(const TensorView& t) {
  const DType d = dtype_of(t);
  return d == DType::f32 ? AttentionDType::f32 : d == DType::bf16 ? AttentionDType::bf16 : AttentionDType::f16;
}

void check_like_q(const TensorView& t, const char* name, const TensorView& q, int64_t rows, int64_t heads) {
  check_rows(t, name, q, rows, heads);
  TE_CHECK(dtype_of(t) == dtype_of(q), name << " is " << describe(t) << "; expected the dtype of q, which is " << describe(q));
}

AttentionCall check_inputs(const TensorView& q, const TensorView& k, const TensorView& v, double scale) {
  check_device(q, "q", kDLCPU);
  check_rank(q, "q", 3, "[rows, heads, head dim]");
  check_dtype(q, "q", {DType::f32, DType::bf16, DType::f16});
  check_inner_contiguous(q, "q");
  check_rank(k, "k", 3, "[rows, kv heads, head dim]");
  const int64_t heads = q.size(1), kv_heads = k.size(1), dim = q.size(2);
  TE_CHECK(dim >= 1 && dim <= kMaxHeadDim, "q is " << describe(q) << "; expected a head dim of 1 to " << kMaxHeadDim);
  TE_CHECK(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0,
           "q has " << heads << " heads and k has " << kv_heads << "; expected a multiple of the kv heads");
  check_like_q(k, "k", q, k.size(0), kv_heads);
  check_like_q(v, "v", q, k.size(0), kv_heads);
  AttentionCall call;
  call.dtype = attention_dtype(q);
  call.rows_q = q.size(0);
  call.heads = heads;
  call.kv_heads = kv_heads;
  call.dim = dim;
  call.scale = checked_scale(scale);
  call.q = view(q);
  call.k = view(k);
  call.v = view(v);
  return call;
}

void attention_forward(TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView cu_k, TensorView start_q,
                       TensorView start_k, TensorView out, TensorView lse, int64_t mask, int64_t left, int64_t right,
                       double scale) {
  AttentionCall call = check_inputs(q, k, v, scale);
  check_like_q(out, "out", q, call.rows_q, call.heads);
  check_contiguous(out, "out");
  check_lse(lse, call.heads, call.rows_q);
  const Segments segments = read_segments(cu_q, cu_k, start_q, start_k, q.size(0), k.size(0), mask, left, right);
  call.out = view(out);
  call.lse = data<float>(lse);

  const std::vector<AttentionForwardItem> items = forward_items(segments, call.heads, call.kv_heads, kForwardChunks);
  const auto run = TE_SIMD_CALL(attention_forward_item);
  const int64_t floats = TE_SIMD_CALL(attention_forward_scratch)(call, kForwardChunks);
  parallel_for(int64_t(items.size()), [&](int64_t i) {
    run(call, segments.list[items[i].segment], items[i], thread_scratch(floats));
  });
  zero_rows(out, segments.q_gaps);
  clear_lse(call.lse, call.heads, call.rows_q, segments.q_gaps);
}

void attention_backward(TensorView dout, TensorView q, TensorView k, TensorView v, TensorView out, TensorView lse,
                        TensorView cu_q, TensorView cu_k, TensorView start_q, TensorView start_k, TensorView dq,
                        TensorView dk, TensorView dv, TensorView dq_acc, int64_t mask, int64_t left, int64_t right,
                        double scale, int64_t dq_accumulation) {
  AttentionCall call = check_inputs(q, k, v, scale);
  check_like_q(dout, "dout", q, call.rows_q, call.heads);
  check_like_q(out, "out", q, call.rows_q, call.heads);
  check_lse(lse, call.heads, call.rows_q);
  check_like_q(dq, "dq", q, call.rows_q, call.heads);
  check_like_q(dk, "dk", q, k.size(0), call.kv_heads);
  check_like_q(dv, "dv", q, k.size(0), call.kv_heads);
  check_contiguous(dq, "dq");
  check_contiguous(dk, "dk");
  check_contiguous(dv, "dv");
  const Segments segments = read_segments(cu_q, cu_k, start_q, start_k, q.size(0), k.size(0), mask, left, right);
  check_dq_accumulator(dq_acc, q, segments, cu_q.size(0) - 1, dq_accumulation);
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
  const auto run = TE_SIMD_CALL(attention_backward_item);
  const int64_t floats = TE_SIMD_CALL(attention_backward_scratch)(call);
  run_backward(segments, call.kv_heads, attention_backward_keys(call.dim),
               [&](const AttentionSegment& segment, const AttentionBackwardItem& item) {
                 run(call, segment, item, wait_for_progress, thread_scratch(floats));
               });
  parallel_for(int64_t(rows.size()), [&](int64_t i) {
    TE_SIMD_CALL(attention_dq_out)(call, *rows[i].segment, rows[i].begin, rows[i].end, thread_scratch(row_floats));
  });
  zero_rows(dq, segments.q_gaps);
  zero_rows(dk, segments.k_gaps);
  zero_rows(dv, segments.k_gaps);
}

TE_EXPORT(attention_forward);
TE_EXPORT(attention_backward);

}  // namespace
}  // namespace te
