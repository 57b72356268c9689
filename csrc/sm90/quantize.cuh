// Launches the passes that a granularity needs (see quantize_kernels.cuh).
#pragma once
#include "context.h"
#include "quantize_kernels.cuh"

namespace te {

struct Nothing {};

// A tensor in memory; rows may be apart. VEC: rows start on 16 bytes and C is a multiple of 8.
template <typename T, bool VEC>
struct PlainSource {
  using type = T;
  using Inputs = Vec8<T>;
  static constexpr bool kPair = false;
  static constexpr int kAhead = 8;
  const T* x;
  int64_t stride;
  __device__ __forceinline__ Nothing prepare(int64_t, int) const { return {}; }
  __device__ __forceinline__ Inputs load(int64_t row, int64_t col, int n) const {
    Inputs v;
    v.template load_n<VEC>(x + row * stride + col, n);
    return v;
  }
  __device__ __forceinline__ void make(const Inputs& in, const Nothing&, Vec8<T>& v, Vec8<T>&) const { v = in; }
};

template <class Source>
int64_t tiles_of(const QuantArgs& q) {
  return ceil_div(q.R, kTile) * ceil_div(Source::kPair ? q.C / 2 : q.C, kTile);
}

template <int FMT, int MODE, class Source>
void launch_cast(const Context& l, const Source& source, const QuantArgs& q, Before before) {
  const unsigned tiles = static_cast<unsigned>(tiles_of<Source>(q));
  if (q.data_t) launch_overlapping(l, quantize_kernel<Source, FMT, MODE, true>, tiles, kQuantThreads, 0, source, q, before);
  else launch_overlapping(l, quantize_kernel<Source, FMT, MODE, false>, tiles, kQuantThreads, 0, source, q, before);
}

template <class Source>
void launch_amax(const Context& l, const Source& source, const QuantArgs& q, uint32_t* row_amax, uint32_t* col_amax) {
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(tiles_of<Source>(q), static_cast<int64_t>(l.sms) * kQuantBlocks<Source>));
  launch_overlapping(l, amax_kernel<Source>, grid, kQuantThreads, 0, source, q.R, q.C, q.used, q.stats, row_amax, col_amax);
}

// Row scaling reads twice: the scale of the first value of a row depends on the last one; begin_quantize has zeroed the arrays of maxima.
template <int FMT, class Source>
void quantize_by_row(const Context& l, const Source& source, QuantArgs q, Before before) {
  uint32_t* row_amax = static_cast<uint32_t*>(q.scale_inv);
  uint32_t* col_amax = static_cast<uint32_t*>(q.scale_inv_t);
  launch_amax(l, source, q, row_amax, col_amax);
  q.write_stats = false;
  q.row_amax = row_amax, q.col_amax = col_amax;
  launch_cast<FMT, kAmaxArrays>(l, source, q, std::max(before, Before::kPass));
  const int64_t nb = col_amax ? q.C : 0;
  finish_scales_kernel<FMT><<<static_cast<unsigned>(ceil_div(q.R + nb, 256)), 256, 0, l.stream>>>(row_amax, q.R, col_amax, nb, q.pow2);
}

// Row, block and MX scaling.
template <int FMT, class Source>
void quantize_scaled(const Context& l, const Source& source, QuantArgs q, int64_t granularity, Before before) {
  if (granularity == kRow) return quantize_by_row<FMT>(l, source, q, before);
  q.write_stats = true;
  if (granularity == kBlock1x128) launch_cast<FMT, kMode1x128>(l, source, q, before);
  else if (granularity == kBlock128x128) launch_cast<FMT, kMode128x128>(l, source, q, before);
  else launch_cast<FMT, kModeMx>(l, source, q, before);
}

// Tensor scaling: one read with a given scale (delayed), two without (current). have_amax: stats are complete already.
template <int FMT, class Source>
void quantize_tensor(const Context& l, const Source& source, QuantArgs q, Before before, bool have_amax) {
  q.write_stats = q.scale != nullptr;
  if (!q.scale && !have_amax) launch_amax(l, source, q, nullptr, nullptr);
  launch_cast<FMT, kGiven>(l, source, q, q.scale ? before : std::max(before, Before::kPass));
}

// FUSED: E5M2 with tensor scaling only (the gradients of fp8_current and fp8_delayed); the host code has refused the rest.
template <bool FUSED, class Source>
void quantize_all(const Context& l, const Source& source, const QuantArgs& q, int64_t granularity, int64_t format, Before before) {
  if (granularity == kTensor) {
    if (format == kE4M3) quantize_tensor<kE4M3>(l, source, q, before, false);
    else quantize_tensor<kE5M2>(l, source, q, before, false);
  } else if (format == kE4M3) {
    quantize_scaled<kE4M3>(l, source, q, granularity, before);
  } else if constexpr (!FUSED) {
    quantize_scaled<kE5M2>(l, source, q, granularity, before);
  }
}

}  // namespace te
