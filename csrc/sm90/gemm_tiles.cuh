// What a GEMM call is, and which tiles it is made of: group sizes are read on the device, tiles are handed out in an order that reuses L2.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include "context.h"

namespace te {

enum class Operands : int { e4m3_e4m3, e5m2_e4m3, bf16, bf16_mn };  // bf16_mn: A is [K, M], B is [K, N] in memory
enum class Mode : int { dense, ragged_m, ragged_k };
// Where scales are applied. epilogue: tensor or row scales (or none). block_b: A 1x128, B 128x128. block_ab: both 1x128.
enum class Scaling : int { epilogue, block_b, block_ab };
// How results reach C. warps: any C. copy_engine: FP32 whose rows start on 16 bytes (vector_c), not ragged_m, whose groups end inside a box.
enum class Store : int { warps, copy_engine };

constexpr int kGemmThreads = 384;
constexpr int kCluster = 2;
constexpr int kBlockN = 128;
constexpr int kMaxGroups = 1024;
constexpr int kSortedGroups = 128;  // ragged_k: more stay in the order that they have
constexpr int kStageBytesK = 128;  // bytes of K in a stage

struct GemmMaps {
  CUtensorMap a, b;
  CUtensorMap c;  // Store::copy_engine only: [groups, M, N] FP32, boxes of 16 x 32
};

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

// ragged_k: order[] = the group with most tokens, the one with fewest, the second of both, and so on to the middle. Called by one whole
// warp after scan_groups.
__device__ __forceinline__ void order_groups(const GemmArgs& p, const int* starts, uint16_t* order) {
  __syncwarp();
  for (int g = threadIdx.x & 31; g < p.groups; g += 32) {
    int at = g;
    if (p.groups <= kSortedGroups) {
      const int tokens = starts[g + 1] - starts[g];
      int rank = 0;  // groups with more tokens, or as many and before this one
      for (int other = 0; other < p.groups; ++other) {
        const int more = starts[other + 1] - starts[other] - tokens;
        rank += more > 0 || (more == 0 && other < g);
      }
      at = 2 * rank < p.groups ? 2 * rank : 2 * (p.groups - rank) - 1;
    }
    order[at] = static_cast<uint16_t>(g);
  }
}

// One output tile: rows row0 .. row_end of A and C, columns col0 .. of B, stages k0 .. k1.
struct Tile {
  int row0, row_end, col0, group, k0, k1;
};

template <Mode MODE, int BM, int BK>
struct Scheduler {
  const GemmArgs& p;
  const int *starts, *tiles;  // of scan_groups
  const uint16_t* order;      // of order_groups
  int row_tiles, pairs, total, index, rank;

  __device__ __forceinline__ Scheduler(const GemmArgs& p, const int* starts, const int* tiles, const uint16_t* order, int rank)
      : p(p), starts(starts), tiles(tiles), order(order), rank(rank) {
    row_tiles = MODE == Mode::ragged_m ? tiles[p.groups + 1] : (p.M + BM - 1) / BM;
    pairs = (p.N + kBlockN * kCluster - 1) / (kBlockN * kCluster);
    total = row_tiles * pairs * (MODE == Mode::ragged_k ? p.groups : 1);
    index = blockIdx.x / kCluster;
  }
  // False when nothing is left. Blocks of a cluster get tiles that differ in col0 only.
  __device__ __forceinline__ bool next(Tile& t) {
    if (index >= total) return false;
    int local = index;
    index += gridDim.x / kCluster;
    t.group = 0;
    constexpr int kBand = 2048 / BM;  // row tiles that share their columns in L2
    if constexpr (MODE == Mode::ragged_k) t.group = next_group<kBand>(local);
    const int band = local / (kBand * pairs), first = band * kBand;
    const int height = min(kBand, row_tiles - first);
    local -= band * kBand * pairs;
    const int m = first + local % height;
    t.col0 = (local / height * kCluster + rank) * kBlockN;
    t.k0 = 0;
    t.k1 = (p.K + BK - 1) / BK;
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
        const int first = starts[t.group], last = starts[t.group + 1];
        t.k0 = first / BK;
        t.k1 = last > first ? (last + BK - 1) / BK : t.k0;
      }
    }
    return true;
  }

 private:
  // ragged_k: the group of tile `index`, which becomes the tile's number in it. Two groups of the order take turns, band by band: tiles of few
  // tokens are bound by the memory's time for C, those of many by products, and together they are bound by neither.
  template <int BAND>
  __device__ __forceinline__ int next_group(int& index) {
    const int of_group = row_tiles * pairs, two = index / (2 * of_group);
    index -= two * 2 * of_group;
    const bool alone = 2 * two + 1 == p.groups;
    const int rows = alone ? 0 : index / (2 * pairs) / BAND * BAND, of_band = min(BAND, row_tiles - rows) * pairs;
    const bool second = !alone && index >= 2 * rows * pairs + of_band;
    index -= rows * pairs + (second ? of_band : 0);  // what of it is the other group's
    const int at = 2 * two + second;
    return order[at];
  }
};

}  // namespace te
