// Launches the passes that a granularity needs (see quantize_tile.cuh): amax from a Source, casts from its Tiles.
#pragma once
#include "context.h"
#include "quantize_tile.cuh"

namespace te {

// A tensor in memory; rows may be apart. VEC: rows start on 16 bytes and C is a multiple of 8.
template <typename T, bool VEC>
struct PlainSource {
  using type = T;
  static constexpr bool kPair = false;
  const T* x;
  int64_t stride;
  using Inputs = Vec8<T>;
  static constexpr int kAhead = 1;  // the loads of all rows are independent as they stand
  __device__ __forceinline__ Inputs load(int64_t row, int64_t col, int n) const {
    Inputs v;
    v.template load_n<VEC>(x + row * stride + col, n);
    return v;
  }
  __device__ __forceinline__ void make(const Inputs& in, Vec8<T>& v, Vec8<T>&) const { v = in; }
};

struct Nothing {};

template <typename T>
struct PlainTiles {
  using type = T;
  static constexpr bool kPair = false, kFused = false;  // kFused: made from several tensors, of which all rows hold values
  static constexpr int kInputs = 1;
  CUtensorMap maps[1];
  __device__ __forceinline__ Nothing prepare(int64_t, int64_t) const { return {}; }
  template <int>
  __device__ __forceinline__ void read(const uint8_t* in, int64_t, int64_t, const Nothing&, Vec8<T>& v, Vec8<T>&) const {
    v.load_shared(in);
  }
};

template <class Source, int FMT, int MODE>
void launch_direct(const Context& l, const Source& source, const QuantArgs& q) {
  const unsigned tiles = static_cast<unsigned>(ceil_div(q.R, kTile) * ceil_div(q.C, kTile));
  if (q.data_t) quantize_kernel<Source, FMT, MODE, true><<<tiles, kQuantThreads, 0, l.stream>>>(source, q);
  else quantize_kernel<Source, FMT, MODE, false><<<tiles, kQuantThreads, 0, l.stream>>>(source, q);
}

template <class Tiles, int FMT, int MODE, bool TR>
void launch_tiles_of(const Context& l, const Tiles& source, const QuantArgs& q, Before before) {
  using Shape = TilesShape<Tiles, MODE, TR>;
  auto* kernel = quantize_tiles_kernel<Tiles, FMT, MODE, TR>;
  static std::atomic<uint64_t> allowed;
  allow_shared_memory(kernel, Shape::kSmem, allowed);
  const int64_t tiles = ceil_div(q.R, kTile) * ceil_div(Tiles::kPair ? q.C / 2 : q.C, kTile);
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(tiles, static_cast<int64_t>(l.sms) * Shape::kBlocks));
  launch_overlapping(l, kernel, grid, kQuantThreads, Shape::kSmem, source, q, before);
}

// How the casts of a tensor are launched: through TMA, or one tile a block where its rows forbid that.
template <class Tiles>
struct ByTiles {
  const Tiles& tiles;
  template <int FMT, int MODE>
  void launch(const Context& l, const QuantArgs& q, Before before) const {
    if (q.data_t) launch_tiles_of<Tiles, FMT, MODE, true>(l, tiles, q, before);
    else launch_tiles_of<Tiles, FMT, MODE, false>(l, tiles, q, before);
  }
};
template <class Source>
struct Direct {
  const Source& source;
  template <int FMT, int MODE>
  void launch(const Context& l, const QuantArgs& q, Before) const {
    launch_direct<Source, FMT, MODE>(l, source, q);
  }
};

template <class Source>
void launch_amax(const Context& l, const Source& source, const QuantArgs& q, uint32_t* row_amax, uint32_t* col_amax) {
  const int64_t tiles = ceil_div(q.R, kTile) * ceil_div(Source::kPair ? q.C / 2 : q.C, kTile);
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(tiles, static_cast<int64_t>(l.sms) * kQuantBlocks<Source>));
  auto* kernel = row_amax ? amax_kernel<Source, true> : amax_kernel<Source, false>;
  launch_overlapping(l, kernel, grid, kQuantThreads, 0, source, q.R, q.C, q.used, q.stats, row_amax, col_amax);
}

// Row, block and MX scaling. Row scaling reads twice: the scale of the first value of a row depends on the last one;
// begin_quantize has zeroed the arrays of maxima.
template <int FMT, class Source, class Cast>
void quantize_scaled(const Context& l, const Source& source, const Cast& cast, QuantArgs q, int64_t granularity, Before before) {
  q.write_stats = true;
  if (granularity == kBlock1x128) return cast.template launch<FMT, kMode1x128>(l, q, before);
  if (granularity == kBlock128x128) return cast.template launch<FMT, kMode128x128>(l, q, before);
  if (granularity == kMx) return cast.template launch<FMT, kModeMx>(l, q, before);
  uint32_t* row_amax = static_cast<uint32_t*>(q.scale_inv);
  uint32_t* col_amax = static_cast<uint32_t*>(q.scale_inv_t);
  launch_amax(l, source, q, row_amax, col_amax);
  q.write_stats = false;
  q.row_amax = row_amax, q.col_amax = col_amax;
  cast.template launch<FMT, kAmaxArrays>(l, q, std::max(before, Before::kPass));
  const int64_t nb = col_amax ? q.C : 0;
  finish_scales_kernel<FMT><<<static_cast<unsigned>(ceil_div(q.R + nb, 256)), 256, 0, l.stream>>>(row_amax, q.R, col_amax, nb, q.pow2);
}

// Tensor scaling: one read with a given scale (delayed), two without (current). have_amax: stats are complete already.
template <int FMT, class Source, class Cast>
void quantize_tensor(const Context& l, const Source& source, const Cast& cast, QuantArgs q, Before before, bool have_amax) {
  q.write_stats = q.scale != nullptr;
  if (!q.scale && !have_amax) launch_amax(l, source, q, nullptr, nullptr);
  cast.template launch<FMT, kGiven>(l, q, q.scale ? before : std::max(before, Before::kPass));
}

// FUSED: E5M2 with tensor scaling only (the gradients of fp8_current and fp8_delayed); the host code has refused the rest.
template <bool FUSED, class Source, class Cast>
void quantize_all(const Context& l, const Source& source, const Cast& cast, const QuantArgs& q, int64_t granularity, int64_t format, Before before,
                  bool have_amax = false) {
  if (granularity == kTensor) {
    if (format == kE4M3) quantize_tensor<kE4M3>(l, source, cast, q, before, have_amax);
    else quantize_tensor<kE5M2>(l, source, cast, q, before, have_amax);
  } else if (format == kE4M3) {
    quantize_scaled<kE4M3>(l, source, cast, q, granularity, before);
  } else if constexpr (!FUSED) {
    quantize_scaled<kE5M2>(l, source, cast, q, granularity, before);
  }
}

}  // namespace te
