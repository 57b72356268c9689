// attention_quantize, attention_fp8_forward and attention_fp8_backward of the CPU library (attention_fp8.h).
//
// Layout of packed segments and what rows outside of them give: attention_segments.h. A scale_inv tensor says by its shape what
// shares a scale: float32[1] the tensor, [heads] a head, [rows, heads] a row of a head.
#include "attention_fp8.h"

#include <algorithm>
#include <vector>

#include "attention_segments.h"
#include "convert.h"
#include "export.h"
#include "parallel.h"
#include "scaling.h"
#include "tensor.h"

namespace te {
namespace {

constexpr int64_t kForwardChunks = 8;  // chunks of 32 queries that one forward item takes through the same keys

struct ScaleLayout {
  int64_t row, head;  // strides
};

ScaleLayout check_scale(const TensorView& t, const char* name, int64_t rows, int64_t heads) {
  check_device(t, name, kDLCPU);
  check_dtype(t, name, {DType::f32});
  check_contiguous(t, name);
  if (t.ndim() == 1 && t.size(0) == 1) return {0, 0};
  if (t.ndim() == 1 && t.size(0) == heads) return {0, 1};
  if (t.ndim() == 2 && t.size(0) == rows && t.size(1) == heads) return {heads, 1};
  TVM_FFI_THROW(ValueError) << name << " is " << describe(t) << "; expected shape [1] (a scale for the tensor), [" << heads
                            << "] (for each head) or [" << rows << ", " << heads << "] (for each row and head)";
}

void check_format(int64_t format, const char* name) {
  TE_CHECK(format >= 0 && format < kFp8Formats,
           name << " is " << format << "; expected 0 (e4m3), 1 (e5m2), 2 (e4m3_fnuz) or 3 (e5m2_fnuz)");
}

// FP8 bytes, or a float8 tensor of just this format.
void check_fp8_dtype(const TensorView& t, const char* name, int64_t format) {
  static constexpr int codes[] = {kDLFloat8_e4m3fn, kDLFloat8_e5m2, kDLFloat8_e4m3fnuz, kDLFloat8_e5m2fnuz};
  static constexpr const char* names[] = {"e4m3", "e5m2", "e4m3_fnuz", "e5m2_fnuz"};
  check_dtype(t, name, {DType::u8, DType::f8});
  TE_CHECK(dtype_of(t) == DType::u8 || int(t.dtype().code) == codes[format],
           name << " is a float8 tensor of another kind than format " << names[format] << "; pass that float8 dtype, or uint8");
}

AttentionFp8Tensor fp8_view(const TensorView& t, const char* name, const TensorView& like, int64_t rows, int64_t heads,
                            int64_t format, const TensorView& scale_inv, const char* scale_name) {
  check_rows(t, name, like, rows, heads);
  check_fp8_dtype(t, name, format);
  const ScaleLayout scale = check_scale(scale_inv, scale_name, rows, heads);
  return {data<const uint8_t>(t), t.stride(0), t.stride(1), data<const float>(scale_inv), scale.row, scale.head};
}

AttentionDType float_dtype(const TensorView& t, const char* name) {
  check_dtype(t, name, {DType::f32, DType::bf16, DType::f16});
  const DType d = dtype_of(t);
  return d == DType::f32 ? AttentionDType::f32 : d == DType::bf16 ? AttentionDType::bf16 : AttentionDType::f16;
}

void check_like_out(const TensorView& t, const char* name, const TensorView& out, int64_t rows, int64_t heads) {
  check_rows(t, name, out, rows, heads);
  check_contiguous(t, name);
  TE_CHECK(dtype_of(t) == dtype_of(out),
           name << " is " << describe(t) << "; expected the dtype of out, which is " << describe(out));
}

AttentionFp8Call check_inputs(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& q_scale_inv,
                              const TensorView& k_scale_inv, const TensorView& v_scale_inv, const TensorView& out,
                              const TensorView& lse, double scale, int64_t format, double p_scale) {
  check_rank(q, "q", 3, "[rows, heads, head dim]");
  check_rank(k, "k", 3, "[rows, kv heads, head dim]");
  const int64_t heads = q.size(1), kv_heads = k.size(1), dim = q.size(2);
  TE_CHECK(dim >= 1 && dim <= kMaxHeadDim, "q is " << describe(q) << "; expected a head dim of 1 to " << kMaxHeadDim);
  TE_CHECK(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0,
           "q has " << heads << " heads and k has " << kv_heads << "; expected a multiple of the kv heads");
  check_format(format, "format");
  TE_CHECK(p_scale > 0 && p_scale <= fp8_max(format),
           "p_scale is " << p_scale << "; P lies between 0 and 1, so expected more than 0 and at most the format's maximum, "
                         << fp8_max(format));
  AttentionFp8Call call;
  call.q = fp8_view(q, "q", q, q.size(0), heads, format, q_scale_inv, "q_scale_inv");
  call.k = fp8_view(k, "k", q, k.size(0), kv_heads, format, k_scale_inv, "k_scale_inv");
  call.v = fp8_view(v, "v", q, k.size(0), kv_heads, format, v_scale_inv, "v_scale_inv");
  call.forward_format = format;
  call.p_scale = float(p_scale);
  check_rows(out, "out", q, q.size(0), heads);
  check_lse(lse, heads, q.size(0));
  call.base.dtype = float_dtype(out, "out");
  call.base.rows_q = q.size(0);
  call.base.heads = heads;
  call.base.kv_heads = kv_heads;
  call.base.dim = dim;
  call.base.scale = checked_scale(scale);
  call.base.out = view(out);
  call.base.lse = data<float>(lse);
  return call;
}

// x[rows, heads, dim] strided, float32, bfloat16 or float16 -> FP8 data[rows, heads, dim] and its scale_inv; stats = (amax with
// NaN kept, number of values that are not finite). Rows outside the segments of cu and start are not read; their data is 0.
// centre: subtract from each head of a segment its mean over the segment's rows (for K: softmax stays the same). rotate: multiply
// each row by the orthogonal Hadamard matrix (for Q and K alike: their product stays the same).
void attention_quantize(TensorView x, TensorView cu, TensorView start, TensorView data_out, TensorView scale_inv,
                        TensorView stats, int64_t format, int64_t centre, int64_t rotate) {
  check_device(x, "x", kDLCPU);
  check_rank(x, "x", 3, "[rows, heads, head dim]");
  const AttentionDType dtype = float_dtype(x, "x");
  check_inner_contiguous(x, "x");
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2);
  check_format(format, "format");
  check_rows(data_out, "data", x, rows, heads);
  check_contiguous(data_out, "data");
  check_fp8_dtype(data_out, "data", format);
  const ScaleLayout layout = check_scale(scale_inv, "scale_inv", rows, heads);
  check_device(stats, "stats", kDLCPU);
  check_dtype(stats, "stats", {DType::f32});
  check_shape(stats, "stats", {2}, "amax, number of values that are not finite");
  check_contiguous(stats, "stats");
  TE_CHECK(centre == 0 || centre == 1, "centre is " << centre << "; expected 0 or 1");
  TE_CHECK(rotate == 0 || rotate == 1, "rotate is " << rotate << "; expected 0 or 1");
  TE_CHECK(rotate == 0 || (dim & (dim - 1)) == 0, "rotate needs a head dim that is a power of two, but it is " << dim);
  const int64_t segments = check_segments(cu, start, rows, "cu", "start", "x");
  const int32_t* lengths = data<const int32_t>(cu);
  const int32_t* starts = data<const int32_t>(start);

  AttentionQuantizeCall call;
  call.x = view(x);
  call.dtype = dtype;
  call.heads = heads;
  call.dim = dim;
  call.format = format;
  call.rotate = rotate == 1;
  call.data = data<uint8_t>(data_out);
  std::vector<double> means(centre == 1 ? size_t(segments * heads * dim) : 0, 0.0);
  struct Task {
    int64_t segment, begin, end;
  };
  std::vector<Task> tasks;
  constexpr int64_t kTaskRows = 64;
  for (int64_t n = 0; n < segments; ++n) {
    const int64_t first = starts[n], last = first + lengths[n + 1] - lengths[n];
    for (int64_t row = first; row < last; row += kTaskRows) tasks.push_back({n, row, std::min(last, row + kTaskRows)});
  }
  const int64_t floats = attention_padded_dim(dim);
  if (centre == 1) {
    parallel_for(segments, [&](int64_t n) {
      const int64_t count = lengths[n + 1] - lengths[n];
      double* mean = means.data() + n * heads * dim;
      TE_SIMD_CALL(attention_column_sums)(call, starts[n], starts[n] + count, mean, thread_scratch(floats));
      for (int64_t i = 0; i < heads * dim && count > 0; ++i) mean[i] /= double(count);
    });
    call.means = means.data();
  }

  std::vector<uint32_t> amax(size_t(rows * heads), 0);
  std::vector<int64_t> nonfinite(tasks.size(), 0);
  parallel_for(int64_t(tasks.size()), [&](int64_t i) {
    const Task& t = tasks[i];
    nonfinite[i] = TE_SIMD_CALL(attention_quantize_amax)(call, t.segment, t.begin, t.end, amax.data(), thread_scratch(floats));
  });
  // As integers, the bits of amaxes order finite < infinity < NaN.
  const int64_t scales = scale_inv.numel();
  std::vector<uint32_t> shared(size_t(scales), 0);
  uint32_t largest = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      const uint32_t a = amax[row * heads + head];
      uint32_t& group = shared[row * layout.row + head * layout.head];
      group = std::max(group, a);
      largest = std::max(largest, a);
    }
  }
  std::vector<float> scale(static_cast<size_t>(scales));
  for (int64_t i = 0; i < scales; ++i) {
    const Scale s = scale_from_amax(shared[i], fp8_max(format), false);
    scale[i] = s.scale;
    data<float>(scale_inv)[i] = s.scale_inv;
  }
  call.scale = scale.data();
  call.scale_row = layout.row;
  call.scale_head = layout.head;
  std::fill_n(call.data, rows * heads * dim, uint8_t(0));
  parallel_for(int64_t(tasks.size()), [&](int64_t i) {
    const Task& t = tasks[i];
    TE_SIMD_CALL(attention_quantize_rows)(call, t.segment, t.begin, t.end, thread_scratch(floats));
  });
  int64_t count = 0;
  for (int64_t n : nonfinite) count += n;
  data<float>(stats)[0] = bits_float(largest);
  data<float>(stats)[1] = float(count);
}

// q, k, v FP8 of one format; out float32, bfloat16 or float16; lse is that of the quantised q and k. P is quantised to `format`
// after a product with p_scale.
void attention_fp8_forward(TensorView q, TensorView k, TensorView v, TensorView q_scale_inv, TensorView k_scale_inv,
                           TensorView v_scale_inv, TensorView cu_q, TensorView cu_k, TensorView start_q, TensorView start_k,
                           TensorView out, TensorView lse, int64_t mask, int64_t left, int64_t right, double scale,
                           int64_t format, double p_scale) {
  const AttentionFp8Call call = check_inputs(q, k, v, q_scale_inv, k_scale_inv, v_scale_inv, out, lse, scale, format, p_scale);
  check_contiguous(out, "out");
  const Segments segments = read_segments(cu_q, cu_k, start_q, start_k, q.size(0), k.size(0), mask, left, right);
  const std::vector<AttentionForwardItem> items = forward_items(segments, call.base.heads, call.base.kv_heads, kForwardChunks);
  const int64_t floats = TE_SIMD_CALL(attention_fp8_forward_scratch)(call, kForwardChunks);
  parallel_for(int64_t(items.size()), [&](int64_t i) {
    TE_SIMD_CALL(attention_fp8_forward_item)(call, segments.list[items[i].segment], items[i], thread_scratch(floats));
  });
  zero_rows(out, segments.q_gaps);
  clear_lse(call.base.lse, call.base.heads, call.base.rows_q, segments.q_gaps);
}

// dout and dS are FP8 of gradient_format; dq, dk, dv have the dtype of out. rotated: q and k were rotated by attention_quantize,
// so dq and dk are rotated back.
void attention_fp8_backward(TensorView dout, TensorView q, TensorView k, TensorView v, TensorView dout_scale_inv,
                            TensorView q_scale_inv, TensorView k_scale_inv, TensorView v_scale_inv, TensorView out,
                            TensorView lse, TensorView cu_q, TensorView cu_k, TensorView start_q, TensorView start_k,
                            TensorView dq, TensorView dk, TensorView dv, TensorView dq_acc, int64_t mask, int64_t left,
                            int64_t right, double scale, int64_t dq_accumulation, int64_t forward_format,
                            int64_t gradient_format, double p_scale, int64_t rotated) {
  AttentionFp8Call call =
      check_inputs(q, k, v, q_scale_inv, k_scale_inv, v_scale_inv, out, lse, scale, forward_format, p_scale);
  AttentionCall& base = call.base;
  check_format(gradient_format, "gradient_format");
  call.dout = fp8_view(dout, "dout", q, base.rows_q, base.heads, gradient_format, dout_scale_inv, "dout_scale_inv");
  call.gradient_format = gradient_format;
  check_like_out(dq, "dq", out, base.rows_q, base.heads);
  check_like_out(dk, "dk", out, k.size(0), base.kv_heads);
  check_like_out(dv, "dv", out, k.size(0), base.kv_heads);
  TE_CHECK(rotated == 0 || rotated == 1, "rotated is " << rotated << "; expected 0 or 1");
  TE_CHECK(rotated == 0 || (base.dim & (base.dim - 1)) == 0,
           "rotated needs a head dim that is a power of two, but it is " << base.dim);
  const Segments segments = read_segments(cu_q, cu_k, start_q, start_k, q.size(0), k.size(0), mask, left, right);
  check_dq_accumulator(dq_acc, q, segments, cu_q.size(0) - 1, dq_accumulation);
  std::vector<float> delta(size_t(base.heads * base.rows_q));
  call.rotated = rotated == 1;
  base.dq = view(dq);
  base.dk = view(dk);
  base.dv = view(dv);
  base.delta = delta.data();
  base.dq_bf16 = dq_accumulation == 1;
  base.dq_acc = data<void>(dq_acc);
  base.dq_rows = base.dq_bf16 ? dq_acc.size(3) : 0;

  const std::vector<RowTask> rows = row_tasks(segments);
  const int64_t row_floats = 2 * attention_padded_dim(base.dim);
  parallel_for(int64_t(rows.size()), [&](int64_t i) {
    TE_SIMD_CALL(attention_fp8_delta)(call, *rows[i].segment, rows[i].begin, rows[i].end, thread_scratch(row_floats));
  });
  const int64_t floats = TE_SIMD_CALL(attention_fp8_backward_scratch)(call);
  run_backward(segments, base.kv_heads, kFp8Tile, [&](const AttentionSegment& segment, const AttentionBackwardItem& item) {
    TE_SIMD_CALL(attention_fp8_backward_item)(call, segment, item, wait_for_progress, thread_scratch(floats));
  });
  parallel_for(int64_t(rows.size()), [&](int64_t i) {
    TE_SIMD_CALL(attention_fp8_dq_out)(call, *rows[i].segment, rows[i].begin, rows[i].end, thread_scratch(row_floats));
  });
  zero_rows(dq, segments.q_gaps);
  zero_rows(dk, segments.k_gaps);
  zero_rows(dv, segments.k_gaps);
}

TE_EXPORT(attention_quantize);
TE_EXPORT(attention_fp8_forward);
TE_EXPORT(attention_fp8_backward);

}  // namespace
}  // namespace te
