// RMSNorm (+ residual) + cast in one kernel that reads its input from memory once: blocks that find rstd of a few rows run some bands of 128
// rows ahead of the blocks that cast a tile of these bands, which find the rows in L2.
//
// A block that casts waits for the rstd of its rows: begin_quantize has set all of them to kUnknownRstd. Blocks start in the order of their
// numbers (CUB's scans rely on that too), and those that find rstd of a band have lower ones than those that wait for it, so that nobody
// waits for a block that has no place on the GPU. They come so far before that they are done as a rule.
#pragma once
#include "fused.cuh"
#include "row_ring.cuh"

namespace te {

// Rows of a block that finds rstd: eight vectors of inputs under way in each thread.
template <bool RESIDUAL>
constexpr int kNormRows = RESIDUAL ? 4 : 8;
constexpr int kNormBlocks = 3;  // an SM

struct NormCast {
  RowInputs<bf16> in;  // x and the residual
  bf16* h;             // their sum, with a residual
  float* rstd;
  const void* w;
  bool w_fp32;
  float eps;
  int ahead;  // bands
};

// rstd of ROWS rows; with a residual also h. The order of the sums is that of rms_norm_forward.
template <int ROWS, bool RESIDUAL>
__device__ __forceinline__ void find_rstd(const NormCast& a, int64_t row0, int64_t R, int C) {
  __shared__ float sums[ROWS][kRowThreads / 32];
  float sum[ROWS] = {};
  for (int k = 0; k * kRowThreads * 8 < C; ++k) {
    const int c = row_column(k);
    auto columns = [&](int r) { return row0 + r < R ? C - c : 0; };
    Vec8<bf16> v[ROWS], residual[RESIDUAL ? ROWS : 1];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      v[r].template load_n<true>(a.in.p[0] + (row0 + r) * a.in.stride[0] + c, columns(r));
      if constexpr (RESIDUAL) residual[r].template load_n<true>(a.in.p[1] + (row0 + r) * a.in.stride[1] + c, columns(r));
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if constexpr (RESIDUAL) {
        v[r].add(residual[r]);
        v[r].template store_n<true>(a.h + (row0 + r) * C + c, columns(r));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[r] = fmaf(v[r].get(j), v[r].get(j), sum[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float total = warp_sum(sum[r]);
    if ((threadIdx.x & 31) == 0) sums[r][threadIdx.x >> 5] = total;
  }
  __syncthreads();
  const int64_t row = row0 + threadIdx.x;
  if (threadIdx.x >= ROWS || row >= R) return;
  ptx::store_release(a.rstd + row, rsqrt_exact(sum_of_warps(sums[threadIdx.x]) / C + a.eps));
}

template <int FMT, int MODE, bool TR, bool RESIDUAL>
__global__ void __launch_bounds__(kQuantThreads, kNormBlocks) norm_cast_kernel(const __grid_constant__ NormCast a, const __grid_constant__ QuantArgs q) {
  static_assert(kRowThreads == kQuantThreads);
  __shared__ QuantSmem<bf16, MODE, TR> sm;
  __shared__ __align__(16) float rstd[kTile];
  const int C = static_cast<int>(q.C), bands = static_cast<int>((q.R + kTile - 1) / kTile), tiles_c = (C + kTile - 1) / kTile;
  constexpr int kFinders = kTile / kNormRows<RESIDUAL>;  // blocks that find the rstd of a band
  // Blocks by number: rstd of the first bands (after < 0); then, band by band, rstd of a later band and the tiles of this one; the last tiles.
  const int lead = a.ahead * kFinders, group = kFinders + tiles_c;
  const int after = static_cast<int>(blockIdx.x) - lead, band = min(max(after, 0) / group, bands - a.ahead);
  const int place = after - band * group, tile = band < bands - a.ahead ? place - kFinders : place;
  ptx::wait_for_previous_kernel();  // which marked rstd and zeroed stats
  if (tile < 0) {
    const int64_t rows = after < 0 ? blockIdx.x : (band + a.ahead) * kFinders + place;
    return find_rstd<kNormRows<RESIDUAL>, RESIDUAL>(a, rows * kNormRows<RESIDUAL>, q.R, C);
  }
  const int row0 = (band + tile / tiles_c) * kTile, col0 = tile % tiles_c * kTile;
  const int lane = threadIdx.x & 31, row_local = threadIdx.x / 16 * 8, col = col0 + (lane & 15) * 8;
  Vec8<bf16> v[8];
  auto load = [&] {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int64_t row = row0 + row_local + r;
      if (row >= q.R || col >= C) v[r].zero();
      else if constexpr (RESIDUAL) v[r].load_changed(a.h + row * C + col);
      else v[r].load(a.in.p[0] + row * a.in.stride[0] + col);
    }
  };
  if constexpr (!RESIDUAL) load();
  if (threadIdx.x < kTile) {
    const float* from = a.rstd + row0 + threadIdx.x;
    float s = 0.f;
    if (row0 + threadIdx.x < q.R)
      while ((s = RESIDUAL ? ptx::load_acquire(from) : ptx::load_relaxed(from)) == kUnknownRstd) __nanosleep(100);
    rstd[threadIdx.x] = s;
  }
  __syncthreads();
  if constexpr (RESIDUAL) load();
  const Weights weights(a.w, a.w_fp32, col, C);
#pragma unroll
  for (int r = 0; r < 8; ++r) normalise(v[r], col < C ? rstd[row_local + r] : 0.f, weights, v[r]);  // past the end 0, not 0 times NaN
  const Scale given = MODE == kGiven ? given_scale<FMT>(q) : Scale{};
  Seen seen;
  quantize_tile<bf16, FMT, MODE, TR>(v, q, row0, col0, given, sm, seen);
  add_seen<bf16>(q, seen);
}

template <int FMT, int MODE, bool RESIDUAL>
void launch_norm_cast_of(const Context& l, NormCast a, const QuantArgs& q) {
  const int64_t bands = ceil_div(q.R, kTile), group = kTile / kNormRows<RESIDUAL> + ceil_div(q.C, kTile);
  // A quarter more blocks than the SMs hold lie between finding rstd and needing it: 20 to 30 MB of input and output, which L2 keeps.
  a.ahead = static_cast<int>(std::min(bands, ceil_div(int64_t{l.sms} * kNormBlocks * 5 / 4, group)));
  const unsigned blocks = static_cast<unsigned>(bands * group);
  if (q.data_t) launch_overlapping(l, norm_cast_kernel<FMT, MODE, true, RESIDUAL>, blocks, kQuantThreads, 0, a, q);
  else launch_overlapping(l, norm_cast_kernel<FMT, MODE, false, RESIDUAL>, blocks, kQuantThreads, 0, a, q);
}

template <int FMT, int MODE>
void launch_norm_cast(const Context& l, const NormCast& a, QuantArgs q) {
  q.write_stats = true;
  if (a.h) launch_norm_cast_of<FMT, MODE, true>(l, a, q);
  else launch_norm_cast_of<FMT, MODE, false>(l, a, q);
}

// Scales that need no amax of the tensor or its rows before the cast.
inline void norm_cast(const Context& l, const NormCast& a, const QuantArgs& q, int64_t granularity, int64_t format) {
  if (granularity == kBlock1x128) launch_norm_cast<kE4M3, kMode1x128>(l, a, q);
  else if (granularity == kBlock128x128) launch_norm_cast<kE4M3, kMode128x128>(l, a, q);
  else if (granularity == kMx) launch_norm_cast<kE4M3, kModeMx>(l, a, q);
  else if (format == kE4M3) launch_norm_cast<kE4M3, kGiven>(l, a, q);
  else launch_norm_cast<kE5M2, kGiven>(l, a, q);
}

}  // namespace te
