// Launches the passes that a granularity needs, for any Source (see quantize_tile.cuh).
#pragma once
#include "context.h"
#include "quantize_tile.cuh"

namespace te {

// A tensor in memory; rows may be apart. VEC: rows start on 16 bytes and C is a multiple of 8.
template <typename T, bool VEC_>
struct PlainSource {
  using type = T;
  static constexpr bool kPair = false, kFused = false;
  const T* x;
  int64_t stride;
  __device__ __forceinline__ void load(int64_t row, int64_t col, int64_t n, Vec8<T>& v) const {
    v.template load_n<VEC_>(x + row * stride + col, n);
  }
};

template <class Source, int FMT, int MODE>
void launch_quantize(const Context& l, const Source& source, const QuantArgs& q, bool reverse) {
  const unsigned tiles = static_cast<unsigned>(ceil_div(q.R, kTile) * ceil_div(Source::kPair ? q.C / 2 : q.C, kTile));
  if (q.data_t) quantize_kernel<Source, FMT, MODE, true><<<tiles, kQuantThreads, 0, l.stream>>>(source, q, reverse);
  else quantize_kernel<Source, FMT, MODE, false><<<tiles, kQuantThreads, 0, l.stream>>>(source, q, reverse);
}

template <class Source>
void launch_amax(const Context& l, const Source& source, const QuantArgs& q, uint32_t* row_amax, uint32_t* col_amax) {
  const int64_t tiles = ceil_div(q.R, kTile) * ceil_div(q.C, kTile);
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(tiles, l.sms * kQuantBlocks<Source>));
  amax_kernel<<<grid, kQuantThreads, 0, l.stream>>>(source, q.R, q.C, q.stats, row_amax, col_amax);
}

// Row, block and MX scaling. Row scaling reads twice: the scale of the first value of a row depends on the last one.
template <class Source, int FMT>
void quantize_source_scaled(const Context& l, const Source& source, QuantArgs q, int64_t granularity) {
  q.write_stats = true;
  if (granularity == kBlock1x128) return launch_quantize<Source, FMT, kMode1x128>(l, source, q, false);
  if (granularity == kBlock128x128) return launch_quantize<Source, FMT, kMode128x128>(l, source, q, false);
  if (granularity == kMx) return launch_quantize<Source, FMT, kModeMx>(l, source, q, false);
  uint32_t* row_amax = static_cast<uint32_t*>(q.scale_inv);
  uint32_t* col_amax = static_cast<uint32_t*>(q.scale_inv_t);
  cudaMemsetAsync(row_amax, 0, q.R * 4, l.stream);
  if (col_amax) cudaMemsetAsync(col_amax, 0, q.C * 4, l.stream);
  launch_amax(l, source, q, row_amax, col_amax);
  q.write_stats = false;
  q.row_amax = row_amax, q.col_amax = col_amax;
  launch_quantize<Source, FMT, kAmaxArrays>(l, source, q, true);
  const int64_t nb = col_amax ? q.C : 0;
  finish_scales_kernel<FMT><<<static_cast<unsigned>(ceil_div(q.R + nb, 256)), 256, 0, l.stream>>>(row_amax, q.R, col_amax, nb, q.pow2);
}

// Tensor scaling: one read with a given scale (delayed), two without (current).
template <class Source, int FMT>
void quantize_source_tensor(const Context& l, const Source& source, QuantArgs q) {
  q.write_stats = q.scale != nullptr;
  if (!q.scale) launch_amax(l, source, q, nullptr, nullptr);
  launch_quantize<Source, FMT, kGiven>(l, source, q, q.scale == nullptr);
}

// Fused sources take E5M2 with tensor scaling only (the gradients of fp8_current and fp8_delayed); the host code has refused the rest.
template <class Source>
void quantize_source(const Context& l, const Source& source, const QuantArgs& q, int64_t granularity, int64_t format) {
  if (granularity == kTensor) {
    if (format == kE4M3) quantize_source_tensor<Source, kE4M3>(l, source, q);
    else quantize_source_tensor<Source, kE5M2>(l, source, q);
  } else if (format == kE4M3) {
    quantize_source_scaled<Source, kE4M3>(l, source, q, granularity);
  } else if constexpr (!Source::kFused) {
    quantize_source_scaled<Source, kE5M2>(l, source, q, granularity);
  }
}

}  // namespace te
