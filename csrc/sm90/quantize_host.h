// Host side of every quantising op: checks the outputs and fills QuantArgs.
#pragma once
#include "host.h"
#include "quantize_kernels.cuh"

namespace te {

struct QuantOutputs {
  TensorView data, scale_inv;
  Optional<TensorView> data_t, scale_inv_t;
  TensorView stats;
  Optional<TensorView> scale;  // delayed scaling
};

// Validates outputs against [R, C] and fills what the kernels need. Throws ValueError.
inline QuantArgs check_quantize(const QuantOutputs& o, int64_t R, int64_t C, int64_t granularity, int64_t format, bool pow2) {
  TE_CHECK(granularity >= kTensor && granularity <= kMx, "granularity code " << granularity << " is unknown (0 to 4)");
  TE_CHECK(!o.scale.has_value() || granularity == kTensor, "a given scale (delayed scaling) needs granularity 0 (tensor)");
  TE_CHECK(o.data_t.has_value() == o.scale_inv_t.has_value(), "data_t and scale_inv_t go together: give both or none");
  const int64_t device_of_data = o.data.device().device_id;
  auto on_device = [&](const TensorView& t, const char* name) {
    TE_CHECK(t.device().device_type == kDLCUDA && t.device().device_id == device_of_data, name << " lies on another device than data");
  };
  auto check_scales = [&](const TensorView& s, const char* name, int64_t rows, int64_t cols) {
    const int64_t cb = ceil_div(cols, kTile), rb = ceil_div(rows, kTile);
    if (granularity == kTensor) check_shape(s, name, {1});
    else if (granularity == kRow) check_shape(s, name, {rows});
    else if (granularity == kBlock1x128) check_shape(s, name, {rows, cb});
    else if (granularity == kBlock128x128) check_shape(s, name, {rb, cb});
    else check_shape(s, name, {rows, ceil_div(cols, 32)});
    if (granularity == kMx)
      TE_CHECK(s.dtype().bits == 8 && (s.dtype().code == kDLUInt || s.dtype().code == kDLFloat8_e8m0fnu), name << " must be uint8 (E8M0)");
    else
      TE_CHECK(is_f32(s), name << " must be float32");
    if (granularity != kBlock1x128) check_contiguous(s, name);
    on_device(s, name);
  };
  check_fp8(o.data, "data", format);
  check_shape(o.data, "data", {R, C});
  check_scales(o.scale_inv, "scale_inv", R, C);
  check_f32(o.stats, "stats");
  check_shape(o.stats, "stats", {2});
  on_device(o.stats, "stats");
  QuantArgs q{};
  q.R = R, q.C = C;
  q.data = pointer<uint8_t>(o.data);
  q.scale_inv = pointer<void>(o.scale_inv);
  q.scales_by_block = granularity == kBlock1x128 && by_block(o.scale_inv, "scale_inv");
  q.stats = pointer<float>(o.stats);
  q.pow2 = pow2 || granularity == kMx;
  q.vec = C % 8 == 0 && aligned(q.data, 8);
  if (o.data_t.has_value()) {
    check_fp8(o.data_t.value(), "data_t", format);
    check_shape(o.data_t.value(), "data_t", {C, R});
    on_device(o.data_t.value(), "data_t");
    check_scales(o.scale_inv_t.value(), "scale_inv_t", C, R);
    q.data_t = pointer<uint8_t>(o.data_t.value());
    q.scale_inv_t = pointer<void>(o.scale_inv_t.value());
    q.scales_t_by_block = granularity == kBlock1x128 && by_block(o.scale_inv_t.value(), "scale_inv_t");
    q.vec_t = R % 16 == 0 && aligned(q.data_t, 16);
  }
  if (o.scale.has_value()) {
    check_f32(o.scale.value(), "scale");
    check_shape(o.scale.value(), "scale", {1});
    on_device(o.scale.value(), "scale");
    q.scale = pointer<const float>(o.scale.value());
  }
  // Casts count tiles, and find a tile's first row and column, in 32 bits.
  TE_CHECK(std::max({R, C, ceil_div(R, kTile) * ceil_div(C, kTile)}) <= INT32_MAX - kTile,
           "tensor too large: " << R << " x " << C << "; rows, columns and 128 x 128 tiles must each stay below 2^31");
  return q;
}

// Whether every row of x starts on 16 bytes and is whole vectors of eight: what 16-byte loads need.
inline bool rows_are_vectors(const void* x, int64_t C, int64_t stride, int64_t size) {
  return C % 8 == 0 && aligned(x, 16) && stride * size % 16 == 0;
}

// n values that begin_quantize sets beside its own.
struct Marks {
  float* p = nullptr;
  int64_t n = 0;
  float value = 0.f;
};

// Zeroes n statistics and two arrays, and sets the marks. A kernel and not a memset: the next kernel may start while this one ends (see
// quantize_kernel), but not before everything in front of it has ended. To be launched with launch_overlapping.
template <int = 0>
__global__ void zero_stats_kernel(float* stats, int64_t n, float* a, int64_t na, float* b, int64_t nb, Marks marks) {
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) stats[i] = 0.f;
  if (i < na) a[i] = 0.f;
  else if (i < na + nb) b[i - na] = 0.f;
  if (i < marks.n) marks.p[i] = marks.value;
}

// Zeroes stats (and scales per row, where maxima are collected), sets marks, deals with empty tensors. False: nothing is left to do.
inline bool begin_quantize(const Launch& l, const QuantArgs& q, int64_t granularity, const Marks& marks = {}) {
  const bool row = granularity == kRow;
  const int64_t na = row ? q.R : 0, nb = row && q.scale_inv_t ? q.C : 0;
  launch_overlapping(l, zero_stats_kernel<0>, static_cast<unsigned>(ceil_div(std::max<int64_t>({na + nb, marks.n, 2}), 256)), 256, 0, q.stats, 2,
                     static_cast<float*>(q.scale_inv), na, static_cast<float*>(q.scale_inv_t), nb, marks);
  if (q.R > 0 && q.C > 0) return true;
  // What has no values has amax 0: scale 1 (a tensor's scale, or the columns of a transposed copy of no rows).
  if (granularity == kTensor || row)
    empty_scales_kernel<<<1, 256, 0, l.stream>>>(q.scale, static_cast<float*>(q.scale_inv), row ? q.R : 1, static_cast<float*>(q.scale_inv_t),
                                                 !q.data_t && !q.scale_inv_t ? 0 : row ? q.C : 1);
  return false;
}

}  // namespace te
