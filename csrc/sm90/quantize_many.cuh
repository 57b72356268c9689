// Kernels that quantise a list of tensors: the tiles of all tensors are one range, and a block finds the tensor of a tile in a table.
//
// The table is a kernel parameter (up to 32 KB since CUDA 12.1): it is read through the constant cache, travels with the launch and is
// recorded with it in a CUDA graph, so nothing is uploaded, cached or kept alive. Tiles, scales and statistics are those of
// quantize_tile.cuh.
#pragma once
#include "quantize.cuh"

namespace te {

struct ManyTensor {
  QuantArgs q;
  const void* x;
  int64_t stride;
  bool vec;  // rows of x are vectors (rows_are_vectors)
};

struct ManyTable {
  static constexpr int kMost = 256;

  bool transposed = false;  // every tensor has a transposed copy (an empty tensor's pointers say nothing)
  int count = 0;
  int first[kMost + 1] = {};  // first[e]: tiles of the tensors before e; first[count]: of all
  ManyTensor tensors[kMost];

  void add(const ManyTensor& t) {
    tensors[count] = t;
    first[count + 1] = first[count] + static_cast<int>(ceil_div(t.q.R, kTile) * ceil_div(t.q.C, kTile));
    ++count;
  }
  __host__ __device__ __forceinline__ int tiles() const { return first[count]; }
  // The last tensor that begins at or before a tile: one without tiles is never found.
  __device__ __forceinline__ int tensor_of(int tile) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= tile) low = middle;
      else high = middle;
    }
    return low;
  }
};
static_assert(sizeof(ManyTable) < 32764 - 16, "a kernel takes 32764 bytes of parameters");

template <typename T>
constexpr int kManyBlocks = kQuantBlocks<PlainSource<T, true>>;

template <typename T>
__device__ __forceinline__ void load_many(const ManyTensor& t, int64_t row0, int64_t col0, Vec8<T> (&v)[8]) {
  Vec8<T> none[8];
  const T* x = static_cast<const T*>(t.x);
  if (t.vec) load_tile(PlainSource<T, true>{x, t.stride}, row0, col0, t.q.R, t.q.C, v, none);
  else load_tile(PlainSource<T, false>{x, t.stride}, row0, col0, t.q.R, t.q.C, v, none);
}

// Before the others, a block a tensor: zeroes the statistics and (row scaling) the maxima of rows and columns, and writes the one scale of
// a tensor without values.
template <int = 0>
__global__ void prepare_many_kernel(const __grid_constant__ ManyTable table, int granularity) {
  const QuantArgs& q = table.tensors[blockIdx.x].q;
  float *a = static_cast<float*>(q.scale_inv), *b = static_cast<float*>(q.scale_inv_t);
  if (threadIdx.x < 2) q.stats[threadIdx.x] = 0.f;
  if (granularity == kRow) fill(0.f, a, q.R, b, table.transposed ? q.C : 0);
  else if (granularity == kTensor && (q.R == 0 || q.C == 0)) fill(empty_scale_inv(q.scale), a, 1, b, table.transposed ? 1 : 0);
}

// Statistics of every tensor; with row scaling also the maxima of its rows and columns, where their scales will be. Persistent.
template <typename T>
__global__ void __launch_bounds__(kQuantThreads, kManyBlocks<T>) amax_many_kernel(const __grid_constant__ ManyTable table) {
  __shared__ uint32_t sm[16][kTile / Elem<T>::kPer];
  uint32_t amax = 0;
  int nonfinite = 0, current = -1;
  auto flush = [&] {
    const uint32_t bits = Elem<T>::magnitude_to_float_bits(__reduce_max_sync(0xffffffffu, amax));
    add_stats(table.tensors[current].q.stats, bits, nonfinite, threadIdx.x & 31);
    amax = 0, nonfinite = 0;
  };
  for (int i = blockIdx.x; i < table.tiles(); i += gridDim.x) {
    const int e = table.tensor_of(i);
    if (e != current && current >= 0) flush();
    current = e;
    const ManyTensor& t = table.tensors[e];
    const int tiles_c = static_cast<int>((t.q.C + kTile - 1) / kTile), tile = i - table.first[e];
    const int64_t row0 = tile / tiles_c * kTile, col0 = tile % tiles_c * kTile;
    Vec8<T> v[8];
    load_many(t, row0, col0, v);
    uint32_t* row_amax = t.q.row_amax ? static_cast<uint32_t*>(t.q.scale_inv) : nullptr;
    uint32_t* col_amax = t.q.col_amax ? static_cast<uint32_t*>(t.q.scale_inv_t) : nullptr;
    amax = max(amax, tile_amax<T>(v, row0, col0, t.q.R, t.q.C, row_amax, col_amax, sm, nonfinite));
  }
  flush();
}

// The casts, a tile a block (quantize_kernel says why); the tiles are taken from the end of the list, which the pass before has left in L2.
// The arguments of the tensor lie in shared memory: as loads from a place in the table that is not known before, they would be kept in
// registers.
template <typename T, int FMT, int MODE, bool TR>
__global__ void __launch_bounds__(kQuantThreads, kManyBlocks<T>) quantize_many_kernel(const __grid_constant__ ManyTable table) {
  __shared__ QuantSmem<T, MODE, TR> sm;
  __shared__ QuantArgs q;
  const int index = table.tiles() - 1 - static_cast<int>(blockIdx.x), e = table.tensor_of(index);
  const ManyTensor& t = table.tensors[e];
  if (threadIdx.x == 0) q = t.q;
  const int tiles_c = static_cast<int>((t.q.C + kTile - 1) / kTile), tile = index - table.first[e];
  const int tile_r = tile / tiles_c, row0 = tile_r * kTile, col0 = (tile - tile_r * tiles_c) * kTile;
  Vec8<T> v[8];
  load_many(t, row0, col0, v);
  __syncthreads();
  const Scale given = MODE == kGiven ? given_scale<FMT>(q) : Scale{};
  Seen seen;
  quantize_tile<T, FMT, MODE, TR>(v, q, row0, col0, given, sm, seen);
  add_seen<T>(q, seen);
}

// Row scaling, after the casts: maxima become scales. A block a tensor.
template <int FMT>
__global__ void finish_many_kernel(const __grid_constant__ ManyTable table) {
  const QuantArgs& q = table.tensors[blockIdx.x].q;
  finish_scales<FMT>(threadIdx.x, blockDim.x, static_cast<uint32_t*>(q.scale_inv), q.R, static_cast<uint32_t*>(q.scale_inv_t),
                     table.transposed ? q.C : 0, q.pow2);
}

template <typename T, int FMT, int MODE>
void launch_casts(const Context& l, const ManyTable& table) {
  const unsigned tiles = static_cast<unsigned>(table.tiles());
  if (table.transposed) quantize_many_kernel<T, FMT, MODE, true><<<tiles, kQuantThreads, 0, l.stream>>>(table);
  else quantize_many_kernel<T, FMT, MODE, false><<<tiles, kQuantThreads, 0, l.stream>>>(table);
}

// The casts, and before them the statistics where scales are made from them.
template <typename T, int FMT>
void launch_tiles(const Context& l, const ManyTable& table, int64_t granularity) {
  const unsigned grid = static_cast<unsigned>(std::min(table.tiles(), l.sms * kManyBlocks<T>));
  const bool given = table.tensors[0].q.scale != nullptr;
  if (granularity == kRow || (granularity == kTensor && !given)) amax_many_kernel<T><<<grid, kQuantThreads, 0, l.stream>>>(table);
  if (granularity == kTensor) launch_casts<T, FMT, kGiven>(l, table);
  else if (granularity == kBlock1x128) launch_casts<T, FMT, kMode1x128>(l, table);
  else if (granularity == kBlock128x128) launch_casts<T, FMT, kMode128x128>(l, table);
  else if (granularity == kMx) launch_casts<T, FMT, kModeMx>(l, table);
  else launch_casts<T, FMT, kAmaxArrays>(l, table);
}

// Every launch that the tensors of a table need: two; three where scales come from the whole tensor, four with a scale a row.
template <typename T, int FMT>
void launch_many(const Context& l, const ManyTable& table, int64_t granularity) {
  prepare_many_kernel<<<table.count, 256, 0, l.stream>>>(table, static_cast<int>(granularity));
  if (table.tiles() > 0) launch_tiles<T, FMT>(l, table, granularity);
  if (granularity == kRow) finish_many_kernel<FMT><<<table.count, 256, 0, l.stream>>>(table);
}

}  // namespace te
