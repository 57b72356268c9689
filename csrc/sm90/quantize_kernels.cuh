// Kernels that quantise the tiles of a Source: a plain tensor (quantize.cuh), or the output of another op that then never exists in memory
// (fused.cuh). Before them the amax where a scale needs it, after them the scales of rows and columns.
#pragma once
#include "quantize_tile.cuh"

namespace te {

// What ran just before a cast in its op. kPass: a kernel that read the same tensor and found the scale: its result is waited for, and the
// tensor is walked from its end, which is in L2. kInputs: that kernel also wrote something that the cast reads as input.
enum class Before { kNothing, kPass, kInputs };

// A Source has `type`; kPair: two output tiles from the same inputs, of a tensor of two halves [R, 2W], the second one W columns further;
// `prepare` (what belongs to a thread's columns); `load` (the inputs of eight values; zeros where n <= 0); `make` (the values); and kAhead: as
// many rows of inputs are asked for before the first is waited for.
template <class Source>
__device__ __forceinline__ void load_tile(const Source& source, int64_t row0, int64_t col0, int64_t R, int64_t C,
                                          Vec8<typename Source::type> (&v)[8], Vec8<typename Source::type> (&second)[8]) {
  constexpr int kAhead = Source::kAhead;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t row = row0 + (warp * 2 + (lane >> 4)) * 8, col = col0 + (lane & 15) * 8;
  const int rows = clamp(R - row, 8), columns = clamp(C - col, 8);
  const auto prepared = source.prepare(col, columns);
#pragma unroll
  for (int first = 0; first < 8; first += kAhead) {
    typename Source::Inputs in[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) in[i] = source.load(row + first + i, col, first + i < rows ? columns : 0);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) source.make(in[i], prepared, v[first + i], second[first + i]);
  }
}

template <class Source>
constexpr int kQuantBlocks = sizeof(typename Source::type) == 4 || Source::kPair ? 2 : 3;

// A tile a block, with nothing kept from one tile to the next: the blocks of an SM wait for their loads, for each other and for their stores at
// different times, and memory is never idle. A persistent block that TMA fed two tiles ahead was a fifth slower (docs/kernels-log.md).
template <class Source, int FMT, int MODE, bool TR>
__global__ void __launch_bounds__(kQuantThreads, kQuantBlocks<Source>)
    quantize_kernel(const __grid_constant__ Source source, const __grid_constant__ QuantArgs q, Before before) {
  using T = typename Source::type;
  __shared__ QuantSmem<T, MODE, TR> sm;
  const int64_t width = Source::kPair ? q.C / 2 : q.C;
  const int tiles_c = static_cast<int>((width + kTile - 1) / kTile);
  const int tile = static_cast<int>(before == Before::kNothing ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  const int row0 = tile / tiles_c * kTile, col0 = tile % tiles_c * kTile;
  // The kernel starts while the one before it ends: what that one wrote is waited for where it is needed. Other inputs were complete before
  // (begin_quantize launches a kernel in between).
  if (before == Before::kInputs) ptx::wait_for_previous_kernel();
  Vec8<T> v[8], second[8];
  load_tile(source, row0, col0, rows_used(q.used, q.R), width, v, second);
  if (before == Before::kPass) ptx::wait_for_previous_kernel();
  const Scale given = MODE == kGiven ? given_scale<FMT>(q) : Scale{};
  Seen seen;
  quantize_tile<T, FMT, MODE, TR>(v, q, row0, col0, given, sm, seen);
  if constexpr (Source::kPair) {
    __syncthreads();
    quantize_tile<T, FMT, MODE, TR>(second, q, row0, col0 + width, given, sm, seen);
  }
  if (before == Before::kNothing) ptx::wait_for_previous_kernel();
  add_seen<T>(q, seen);
}

// amax of the tensor into stats, of rows into row_amax and of columns into col_amax (each may be null), as FP32 bits that
// the caller zeroed. Persistent.
template <class Source>
__global__ void __launch_bounds__(kQuantThreads, kQuantBlocks<Source>)
    amax_kernel(const __grid_constant__ Source source, int64_t R, int64_t C, const int64_t* used, float* stats, uint32_t* row_amax, uint32_t* col_amax) {
  using T = typename Source::type;
  __shared__ uint32_t sm[16][kTile / Elem<T>::kPer];
  const int64_t width = Source::kPair ? C / 2 : C;
  const int64_t tiles_c = (width + kTile - 1) / kTile, tiles = tiles_c * ((R + kTile - 1) / kTile);
  const int64_t loaded = rows_used(used, R);
  ptx::let_next_kernel_start();
  const bool arrays = row_amax || col_amax;
  if (arrays) ptx::wait_for_previous_kernel();  // which zeroed them and stats
  uint32_t amax = 0;
  int nonfinite = 0;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t row0 = index / tiles_c * kTile, col0 = index % tiles_c * kTile;
    Vec8<T> v[8], second[8];
    load_tile(source, row0, col0, loaded, width, v, second);
    amax = max(amax, tile_amax<T>(v, row0, col0, R, width, row_amax, col_amax, sm, nonfinite));
    if constexpr (Source::kPair) amax = max(amax, tile_amax<T>(second, row0, col0 + width, R, C, row_amax, col_amax, sm, nonfinite));
  }
  if (!arrays) ptx::wait_for_previous_kernel();
  add_stats(stats, Elem<T>::magnitude_to_float_bits(__reduce_max_sync(0xffffffffu, amax)), nonfinite, threadIdx.x & 31);
}

// Turns amax bits into scale_inv in place, after the cast that needed them: entries first, first + step, ... of a, then of b.
template <int FMT>
__device__ __forceinline__ void finish_scales(int64_t first, int64_t step, uint32_t* a, int64_t na, uint32_t* b, int64_t nb, bool pow2) {
  for (int64_t i = first; i < na + nb; i += step) {
    uint32_t* p = i < na ? a + i : b + (i - na);
    *reinterpret_cast<float*>(p) = scale_from_amax(*p, kFormatMax<FMT>, pow2).inv;
  }
}

template <int FMT>
__global__ void finish_scales_kernel(uint32_t* a, int64_t na, uint32_t* b, int64_t nb, bool pow2) {
  const int64_t step = gridDim.x * static_cast<int64_t>(blockDim.x);
  finish_scales<FMT>(blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x, step, a, na, b, nb, pow2);
}

// One block fills both.
__device__ __forceinline__ void fill(float value, float* a, int64_t na, float* b, int64_t nb) {
  for (int64_t i = threadIdx.x; i < na; i += blockDim.x) a[i] = value;
  for (int64_t i = threadIdx.x; i < nb; i += blockDim.x) b[i] = value;
}

// scale_inv of what has no values: 1, or the inverse of the given scale.
__device__ __forceinline__ float empty_scale_inv(const float* scale) { return scale ? __fdiv_rn(1.f, *scale) : 1.f; }

template <int = 0>
__global__ void empty_scales_kernel(const float* scale, float* a, int64_t na, float* b, int64_t nb) {
  fill(empty_scale_inv(scale), a, na, b, nb);
}

}  // namespace te
