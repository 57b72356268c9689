// What a GEMM call is, and which tiles it is made of: group sizes are read on the device, tiles are handed out in an order that reuses L2.
#pragma once
#include <cuda_bf16.h>

#include "context.h"

namespace te {

// bf16_mn: A is [K, M] and B [K, N] in memory. bf16_b_mn: B alone, of every group [K, N].
enum class Operands : int { e4m3_e4m3, e5m2_e4m3, bf16, bf16_mn, bf16_b_mn };
enum class Mode : int { dense, ragged_m, ragged_k };
// Where scales are applied. epilogue: tensor or row scales (or none). block_b: A 1x128, B 128x128. block_ab: both 1x128.
enum class Scaling : int { epilogue, block_b, block_ab };

constexpr int kGemmThreads = 384;
constexpr int kCluster = 2;
constexpr int kBlockN = 128;
constexpr int kMaxGroups = 1024;
constexpr int kStageBytesK = 128;  // bytes of K in a stage

struct GemmArgs {
  int M, N, K;      // of one group; ragged_m: M = all rows; ragged_k: K = all tokens
  void* c;          // row-major, row stride N
  bool c_fp32, accumulate;
  bool vector_c;    // rows of C start on 16 bytes: stores of 16 bytes
  // Epilogue scales: scalar (per group of B with scale_b_groups), or per row and per column; null: none.
  const float* scale_a;
  const float* scale_b;
  bool scale_rows;        // false: scale_a[0] * scale_b[group or 0]; true: scale_a[row] * scale_b[column]
  bool scale_b_groups;
  int scale_k;            // K blocks of 128: row length of block scales
  bool scale_a_by_block, scale_b_by_block;  // 1x128: block after block in memory instead of line after line
  // Groups.
  const void* sizes;
  bool sizes64;
  int groups;
};

// First row (or token) of every group in shared memory, starts[0..E]; for ragged_m also starts[E+1] (the end of the rows) and the first
// row tile of every group, tiles[0..E+1]; its group E is the rows past the last group. Called by one whole warp.
template <Mode MODE, int BM>
__device__ __forceinline__ void scan_groups(const GemmArgs& p, int* starts, int* tiles) {
  const int lane = threadIdx.x & 31;
  const int rows = MODE == Mode::ragged_m ? p.M : p.K;
  int start = 0, tile = 0;
  for (int base = 0; base < p.groups; base += 32) {
    const int g = base + lane;
    int size = 0;
    if (g < p.groups) {
      const int64_t raw = p.sizes64 ? static_cast<const int64_t*>(p.sizes)[g] : static_cast<const int*>(p.sizes)[g];
      size = raw < 0 ? 0 : raw > rows ? rows : static_cast<int>(raw);
    }
    int64_t end = size;  // inclusive scan; 32 sizes of at most `rows` each may pass 2^31
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int64_t other = __shfl_up_sync(0xffffffffu, end, d);
      if (lane >= d) end += other;
    }
    end += start;
    const int first = static_cast<int>(min(end - size, static_cast<int64_t>(rows)));
    const int last = static_cast<int>(min(end, static_cast<int64_t>(rows)));
    if (g < p.groups) starts[g] = first;
    start = __shfl_sync(0xffffffffu, last, 31);
    if constexpr (MODE == Mode::ragged_k) continue;
    int count = (last - first + BM - 1) / BM;
    const int own = count;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int other = __shfl_up_sync(0xffffffffu, count, d);
      if (lane >= d) count += other;
    }
    if (g < p.groups) tiles[g] = tile + count - own;
    tile += __shfl_sync(0xffffffffu, count, 31);
  }
  if (lane == 0) {
    starts[p.groups] = start;
    if constexpr (MODE == Mode::ragged_m) {
      starts[p.groups + 1] = rows;
      tiles[p.groups] = tile;
      tiles[p.groups + 1] = tile + (rows - start + BM - 1) / BM;
    }
  }
}

// One output tile: rows row0 .. row_end of A and C, columns col0 .. of B, stages k0 .. k1.
struct Tile {
  int row0, row_end, col0, group, k0, k1, first, last;  // first, last: values of K that belong to the group (ragged_k)
};

template <Mode MODE, int BM, int BK>
struct Scheduler {
  const GemmArgs& p;
  const int *starts, *tiles;
  int row_tiles, pairs, total, index, step, rank;

  __device__ __forceinline__ Scheduler(const GemmArgs& p, const int* starts, const int* tiles, int rank)
      : p(p), starts(starts), tiles(tiles), rank(rank) {
    row_tiles = MODE == Mode::ragged_m ? tiles[p.groups + 1] : (p.M + BM - 1) / BM;
    pairs = (p.N + kBlockN * kCluster - 1) / (kBlockN * kCluster);
    total = row_tiles * pairs * (MODE == Mode::ragged_k ? p.groups : 1);
    index = blockIdx.x / kCluster;
    step = gridDim.x / kCluster;
  }
  // False when nothing is left. Blocks of a cluster get tiles that differ in col0 only.
  __device__ __forceinline__ bool next(Tile& t) {
    if (index >= total) return false;
    int local = index;
    index += step;
    t.group = 0;
    if constexpr (MODE == Mode::ragged_k) {
      t.group = local / (row_tiles * pairs);
      local -= t.group * (row_tiles * pairs);
    }
    constexpr int kBand = 2048 / BM;  // row tiles that share their columns in L2
    const int band = local / (kBand * pairs), first = band * kBand;
    const int height = min(kBand, row_tiles - first);
    local -= band * kBand * pairs;
    const int m = first + local % height;
    t.col0 = (local / height * kCluster + rank) * kBlockN;
    t.k0 = 0;
    t.k1 = (p.K + BK - 1) / BK;
    t.first = 0, t.last = p.K;
    if constexpr (MODE == Mode::ragged_m) {
      int low = 0, high = p.groups;  // last group whose first tile is <= m
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (tiles[middle] <= m) low = middle;
        else high = middle - 1;
      }
      t.group = low;
      t.row0 = starts[low] + (m - tiles[low]) * BM;
      t.row_end = starts[low + 1];
      if (low == p.groups) t.k1 = 0;
    } else {
      t.row0 = m * BM;
      t.row_end = p.M;
      if constexpr (MODE == Mode::ragged_k) {
        t.first = starts[t.group], t.last = starts[t.group + 1];
        t.k0 = t.first / BK;
        t.k1 = t.last > t.first ? (t.last + BK - 1) / BK : t.k0;
      }
    }
    return true;
  }
};

}  // namespace te
