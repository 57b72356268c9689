// Packed segments for attention kernels that live outside this library (cuDNN): a length and an element offset for every segment, and
// the rows outside every segment afterwards. The lists are read on the device only, so no call waits for the GPU.
#include <tvm/ffi/container/array.h>

#include "host.h"

namespace te {
namespace {

constexpr int kThreads = 256, kMaxStrides = 8;

// One list of segments: rows start[n] .. start[n] + cu[n+1] - cu[n] of a tensor of `rows` rows.
struct SegmentList {
  const int *cu, *start;
  int rows;
};

struct Strides {
  int64_t value[kMaxStrides];
  int of_q, count;  // the first of_q belong to the list of q
};

__device__ __forceinline__ bool fits(const SegmentList& list, int n) {
  const int64_t length = static_cast<int64_t>(list.cu[n + 1]) - list.cu[n], start = list.start[n], next = list.start[n + 1];
  return start >= 0 && start <= next && length >= 0 && (length == 0 || start + length <= next);
}

// One block. Lists that are not valid become segments without rows, so that whatever reads them stays inside its tensors.
__global__ void segment_offsets_kernel(SegmentList q, SegmentList kv, int segments, bool equal_lengths, const __grid_constant__ Strides strides, int* lengths, int64_t* offsets,
                                       int* valid) {
  bool good = true;
  for (int n = threadIdx.x; n < segments; n += kThreads) {
    good &= fits(q, n) && fits(kv, n);
    if (equal_lengths) good &= q.cu[n + 1] - q.cu[n] == kv.cu[n + 1] - kv.cu[n];
  }
  if (threadIdx.x == 0) good &= q.cu[0] == 0 && kv.cu[0] == 0 && q.start[segments] <= q.rows && kv.start[segments] <= kv.rows;
  good = __syncthreads_and(good);
  if (threadIdx.x == 0) *valid = good;
  for (int n = threadIdx.x; n <= segments; n += kThreads) {
    if (n < segments) {
      lengths[n] = good ? q.cu[n + 1] - q.cu[n] : 0;
      lengths[segments + n] = good ? kv.cu[n + 1] - kv.cu[n] : 0;
    }
    for (int i = 0; i < strides.count; ++i) {
      const SegmentList& list = i < strides.of_q ? q : kv;
      offsets[static_cast<int64_t>(i) * (segments + 1) + n] = good ? min(max(list.start[n], 0), list.rows) * strides.value[i] : 0;
    }
  }
}

// Every warp looks at 32 rows at once and fills those that no segment holds; all rows, with NaN, where the lists are not valid.
__global__ void fill_outside_kernel(uint4* x, int64_t row_vectors, int rows, const int* cu, const int* start, int segments, const int* valid, uint32_t nan) {
  const int lane = threadIdx.x & 31;
  const bool good = *valid != 0;
  const uint32_t word = good ? 0u : nan;
  const int warps = gridDim.x * (kThreads / 32);
  for (int first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * 32; first < rows; first += warps * 32) {
    const int row = first + lane;
    bool outside = row < rows;
    if (outside && good) {
      int low = 0, high = segments;  // how many segments start at or before the row
      while (low < high) {
        const int middle = (low + high) / 2;
        if (start[middle] <= row) low = middle + 1;
        else high = middle;
      }
      outside = low == 0 || row >= start[low - 1] + cu[low] - cu[low - 1];
    }
    for (uint32_t todo = __ballot_sync(0xffffffffu, outside); todo; todo &= todo - 1) {
      uint4* out = x + (first + __ffs(todo) - 1) * row_vectors;
      for (int64_t i = lane; i < row_vectors; i += 32) out[i] = make_uint4(word, word, word, word);
    }
  }
}

SegmentList segment_list(const TensorView& cu, const TensorView& start, const char* cu_name, const char* start_name, int64_t segments, int64_t rows,
                         const TensorView& first) {
  check_i32(cu, cu_name);
  check_i32(start, start_name);
  check_same_device(cu, first, cu_name);
  check_same_device(start, first, start_name);
  check_shape(cu, cu_name, {segments + 1});
  check_shape(start, start_name, {segments + 1});
  TE_CHECK(rows >= 0 && rows <= INT32_MAX, "a tensor of " << rows << " rows is too long; the lists are int32");
  return {pointer<const int>(cu), pointer<const int>(start), static_cast<int>(rows)};
}

// cu_*, start_* int32[N+1]; lengths int32[2,N] (of q, of kv); offsets int64[R,N+1], row i: start times the i-th of q_strides, then of
// kv_strides; valid int32[1]. equal_lengths: a segment's q and kv lengths must agree (the causal mask without a corner).
void segment_offsets(TensorView cu_q, TensorView start_q, TensorView cu_kv, TensorView start_kv, int64_t rows_q, int64_t rows_kv, ffi::Array<int64_t> q_strides,
                     ffi::Array<int64_t> kv_strides, int64_t equal_lengths, TensorView lengths, TensorView offsets, TensorView valid) {
  const Launch l(cu_q);
  const int64_t segments = cu_q.ndim() == 1 ? cu_q.size(0) - 1 : -1;
  TE_CHECK(segments >= 0, "cu_q must be int32[N+1], got " << shape_text(cu_q));
  const SegmentList q = segment_list(cu_q, start_q, "cu_q", "start_q", segments, rows_q, cu_q);
  const SegmentList kv = segment_list(cu_kv, start_kv, "cu_kv", "start_kv", segments, rows_kv, cu_q);
  Strides strides{{}, static_cast<int>(q_strides.size()), static_cast<int>(q_strides.size() + kv_strides.size())};
  TE_CHECK(strides.count <= kMaxStrides, "at most " << kMaxStrides << " strides, got " << strides.count);
  for (int i = 0; i < strides.count; ++i) strides.value[i] = i < strides.of_q ? q_strides[i] : kv_strides[i - strides.of_q];
  check_i32(lengths, "lengths");
  check_shape(lengths, "lengths", {2, segments});
  TE_CHECK(is_dtype(offsets, kDLInt, 64), "offsets must be int64");
  check_contiguous(offsets, "offsets");
  check_shape(offsets, "offsets", {strides.count, segments + 1});
  check_i32(valid, "valid");
  check_shape(valid, "valid", {1});
  for (const auto& [t, name] : {std::pair{lengths, "lengths"}, {offsets, "offsets"}, {valid, "valid"}}) check_same_device(t, cu_q, name);
  segment_offsets_kernel<<<1, kThreads, 0, l.stream>>>(q, kv, static_cast<int>(segments), equal_lengths != 0, strides, pointer<int>(lengths),
                                                       pointer<int64_t>(offsets), pointer<int>(valid));
  TE_LAUNCHED("segment_offsets");
}

// x[T,...] contiguous, rows a multiple of 16 bytes: rows outside every segment become 0; every row NaN where valid[0] is 0.
void fill_outside(TensorView x, TensorView cu, TensorView start, TensorView valid) {
  const Launch l(x);
  const Type type = float_type(x, "x");
  TE_CHECK(x.ndim() >= 2, "x must be [T, ...], got " << shape_text(x));
  check_contiguous(x, "x");
  const int64_t rows = x.size(0), segments = cu.ndim() == 1 ? cu.size(0) - 1 : -1;
  TE_CHECK(segments >= 0, "cu must be int32[N+1], got " << shape_text(cu));
  const SegmentList list = segment_list(cu, start, "cu", "start", segments, rows, x);
  check_i32(valid, "valid");
  check_shape(valid, "valid", {1});
  check_same_device(valid, x, "valid");
  if (x.numel() == 0) return;
  const int64_t row_bytes = x.numel() / rows * (type == Type::fp32 ? 4 : 2);
  TE_CHECK(row_bytes % 16 == 0 && aligned(pointer<void>(x), 16), "rows of " << row_bytes << " bytes cannot be filled in pieces of 16 bytes");
  const uint32_t nan = type == Type::fp32 ? 0x7fc00000u : type == Type::bf16 ? 0x7fc07fc0u : 0x7e007e00u;
  const int blocks = static_cast<int>(std::min<int64_t>(ceil_div(rows, kThreads), 4 * l.sms));
  fill_outside_kernel<<<blocks, kThreads, 0, l.stream>>>(pointer<uint4>(x), row_bytes / 16, list.rows, list.cu, list.start, static_cast<int>(segments),
                                                         pointer<const int>(valid), nan);
  TE_LAUNCHED("fill_outside");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(segment_offsets, te::segment_offsets);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill_outside, te::fill_outside);
