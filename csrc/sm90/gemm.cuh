// C[M,N] (+)= A[M,K] B[N,K]^T on the tensor cores of Hopper: one persistent, warp-specialised kernel for dense and grouped GEMM.
//
// 384 threads: warpgroups 0 and 1 compute (wgmma), warp 0 of warpgroup 2 feeds shared memory through TMA. Two blocks form a cluster
// that computes two neighbouring 128-column tiles of the same rows: A is loaded once, half by each, and multicast to both.
// A tile is BM = 128 * WAVES rows x 128 columns; a stage holds 128 bytes of K (128 FP8, 64 BF16 values) of A and B.
//
// FP8 sums stay in the tensor cores for 128 values of K only (they keep about 14 bits there), then join FP32 registers, where
// block scales are applied: the tile's 64-row waves take turns, so that one warpgroup adds while the other multiplies.
//
// Modes. kDense. kRaggedM: rows of A and C are in E groups given by device sizes, B is [E, N, K]; rows past the last group become 0.
// kRaggedK: K (tokens) is in groups, C is [E, M, N]; stages begin at multiples of 128 bytes of K whatever the group, so scale blocks
// stay whole, and values of K outside the group are zeroed in shared memory.
// Group sizes are read on the device at the start of every block: no host synchronisation, any sizes. A negative size counts as 0,
// and groups are cut where the rows end.
#pragma once
#include <cuda_bf16.h>

#include "context.h"
#include "ptx.cuh"

namespace te {

enum class Operands : int { e4m3_e4m3, e5m2_e4m3, bf16, bf16_mn };  // bf16_mn: A is [K, M], B is [K, N] in memory
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
  // Groups.
  const void* sizes;
  bool sizes64;
  int groups;
};

template <Operands OPS, Mode MODE, Scaling SCALING, int WAVES>
struct GemmShape {
  static constexpr bool kFp8 = OPS == Operands::e4m3_e4m3 || OPS == Operands::e5m2_e4m3;
  static constexpr bool kMn = OPS == Operands::bf16_mn;
  static constexpr int kBlockM = 128 * WAVES;
  static constexpr int kBlockK = kFp8 ? 128 : 64;
  static constexpr int kStages = WAVES == 2 ? 4 : 6;
  static constexpr int kBytesA = kBlockM * kStageBytesK, kBytesB = kBlockN * kStageBytesK;
  static constexpr int kStaging = 8 * 2048;  // epilogue, 2 KB a warp
  // Block scales of a stage: one a row, then (block_ab) one a column; a warp of the producer brings each half of the rows, a third
  // warp the columns.
  static constexpr int kStageScales = SCALING == Scaling::epilogue ? 0 : kBlockM + (SCALING == Scaling::block_ab ? kBlockN : 0);
  static constexpr int kScaleWarps = SCALING == Scaling::epilogue ? 0 : SCALING == Scaling::block_b ? 2 : 3;
  static constexpr int kGroupInts = MODE == Mode::dense ? 0 : 2 * (kMaxGroups + 2);
  static constexpr int kSmem = kStages * (kBytesA + kBytesB) + kStaging + kStages * kStageScales * 4 + kStages * 16 + kGroupInts * 4;
};

// First row (or token) and first row tile of every group in shared memory: starts[0..E], tiles[0..E+1]. Group E of ragged_m is the
// rows past the last group. Called by one whole warp.
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
    int count = (last - first + BM - 1) / BM;
    const int own = count;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int other = __shfl_up_sync(0xffffffffu, count, d);
      if (lane >= d) count += other;
    }
    if (g < p.groups) starts[g] = first, tiles[g] = tile + count - own;
    start = __shfl_sync(0xffffffffu, last, 31);
    tile += __shfl_sync(0xffffffffu, count, 31);
  }
  if (lane == 0) {
    starts[p.groups] = start;
    starts[p.groups + 1] = rows;
    tiles[p.groups] = tile;
    tiles[p.groups + 1] = tile + (rows - start + BM - 1) / BM;
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

template <Operands OPS>
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  if constexpr (OPS == Operands::e4m3_e4m3) ptx::wgmma_e4m3_e4m3(d, a, b, add);
  else if constexpr (OPS == Operands::e5m2_e4m3) ptx::wgmma_e5m2_e4m3(d, a, b, add);
  else if constexpr (OPS == Operands::bf16) ptx::wgmma_bf16(d, a, b, add);
  else ptx::wgmma_bf16_mn(d, a, b, add);
}

// Zeroes what lies outside bytes [low, high) of K of a K-major tile, or outside rows [low, high) of an MN-major one.
template <bool MN>
__device__ __forceinline__ void mask_tile(uint8_t* tile, int rows, int low, int high, int thread, int threads) {
  for (int u = thread; u < rows * 8; u += threads) {
    const int row = u >> 3, chunk = u & 7;
    uint4* p = reinterpret_cast<uint4*>(tile + row * 128 + ((chunk ^ (row & 7)) * 16));
    if constexpr (MN) {
      const int k = row & 63;
      if (k < low || k >= high) *p = make_uint4(0, 0, 0, 0);
    } else {
      const int from = low - chunk * 16, to = high - chunk * 16;
      if (from <= 0 && to >= 16) continue;
      uint4 v = *p;
      uint32_t* w = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t keep = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b)
          if (k * 4 + b >= from && k * 4 + b < to) keep |= 0xffu << (8 * b);
        w[k] &= keep;
      }
      *p = v;
    }
  }
}

// Writes (or adds) one 64 x 128 wave of a warpgroup to C through the warp's 2 KB of shared memory, in 16-byte pieces of rows.
template <typename T, bool ROW_SCALES>
__device__ __forceinline__ void store_wave(const float (&d)[64], uint8_t* staging, const GemmArgs& p, T* c, int row0, int row_end, int col0,
                                           const float* scale_a, const float* scale_b, float scale) {
  constexpr int kColumns = 128 / sizeof(T), kVector = 16 / sizeof(T);
  const int lane = threadIdx.x & 31;
  const int r = lane >> 2, q = lane & 3;
  float row_scale[2] = {scale, scale};
  if constexpr (ROW_SCALES) {
    row_scale[0] = scale_a[min(row0 + r, p.M - 1)];
    row_scale[1] = scale_a[min(row0 + r + 8, p.M - 1)];
  }
#pragma unroll
  for (int part = 0; part < kBlockN / kColumns; ++part) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int at = (part * (kColumns / 8) + j) * 4;
      float s0 = 1.f, s1 = 1.f;
      if constexpr (ROW_SCALES) {
        const int col = col0 + part * kColumns + j * 8 + q * 2;
        s0 = __ldg(scale_b + min(col, p.N - 1)), s1 = __ldg(scale_b + min(col + 1, p.N - 1));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = r + 8 * h;
        float x = d[at + 2 * h] * row_scale[h], y = d[at + 2 * h + 1] * row_scale[h];
        if constexpr (ROW_SCALES) x *= s0, y *= s1;
        if constexpr (sizeof(T) == 2) {
          *reinterpret_cast<__nv_bfloat162*>(staging + row * 128 + ((j ^ (row & 7)) * 16) + q * 4) = __floats2bfloat162_rn(x, y);
        } else {
          *reinterpret_cast<float2*>(staging + row * 128 + (((j * 2 + (q >> 1)) ^ (row & 7)) * 16) + (q & 1) * 8) = make_float2(x, y);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = k * 4 + (lane >> 3), chunk = lane & 7;
      uint4 v = *reinterpret_cast<const uint4*>(staging + row * 128 + ((chunk ^ (row & 7)) * 16));
      const int col = col0 + part * kColumns + chunk * kVector;
      if (row0 + row < row_end && col < p.N) {
        T* out = c + static_cast<int64_t>(row0 + row) * p.N + col;
        if (p.vector_c) {
          if constexpr (sizeof(T) == 4) {
            if (p.accumulate) {
              ptx::add_float4(out, v);
              continue;
            }
          }
          *reinterpret_cast<uint4*>(out) = v;
        } else {
          const T* values = reinterpret_cast<const T*>(staging + row * 128 + ((chunk ^ (row & 7)) * 16));
          const int n = min(kVector, p.N - col);
#pragma unroll 1
          for (int i = 0; i < n; ++i) {
            if constexpr (sizeof(T) == 4) out[i] = p.accumulate ? out[i] + values[i] : values[i];
            else out[i] = values[i];
          }
        }
      }
    }
    __syncwarp();
  }
}

// One warp of the producer: for every stage of a tile, N block scales a lane (rows or columns first, first + 32, ... of a matrix with
// `limit` of them), times factor[k] when given, into shared memory. Two K blocks are read at a time where rows of scales start on 8
// bytes (four at a time would spill the producer's 40 registers); the next loads are issued before the wait for a free stage.
template <int N, int STRIDE, typename Advance>
__device__ __forceinline__ void bring_scales(const float* from, const float* factor, int first, int limit, const GemmArgs& p, const Tile& t, float* to,
                                             uint64_t* full, uint64_t* empty, const int& stage, const uint32_t& phase, const Advance& advance) {
  if (t.k0 >= t.k1) return;
  const bool two = p.scale_k % 2 == 0 && (reinterpret_cast<uintptr_t>(from) & 7) == 0;
  int at[N];
  float2 value[N];
#pragma unroll
  for (int i = 0; i < N; ++i) at[i] = min(first + 32 * i, limit - 1) * p.scale_k;
  auto read = [&](int k) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (two) value[i] = __ldg(reinterpret_cast<const float2*>(from + at[i] + (k & ~1)));
      else value[i].x = __ldg(from + at[i] + k);
    }
  };
  read(t.k0);
  float f = factor ? __ldg(factor + t.k0) : 1.f;
#pragma unroll 1
  for (int k = t.k0; k < t.k1; ++k, advance()) {
    ptx::barrier_wait(empty + stage, phase ^ 1);
    const bool second = two && (k & 1);
#pragma unroll
    for (int i = 0; i < N; ++i) to[stage * STRIDE + 32 * i] = (second ? value[i].y : value[i].x) * f;
    if (k + 1 < t.k1) {
      if (!two || second) read(k + 1);
      if (factor) f = __ldg(factor + k + 1);
    }
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(full + stage);
  }
}

template <Operands OPS, Mode MODE, Scaling SCALING, int WAVES>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const __grid_constant__ GemmArgs p) {
  using Shape = GemmShape<OPS, MODE, SCALING, WAVES>;
  constexpr int kStages = Shape::kStages, BM = Shape::kBlockM, BK = Shape::kBlockK;
  constexpr bool kMn = Shape::kMn;

  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* smem_a = smem;
  uint8_t* smem_b = smem_a + kStages * Shape::kBytesA;
  uint8_t* staging = smem_b + kStages * Shape::kBytesB;
  float* scales = reinterpret_cast<float*>(staging + Shape::kStaging);
  uint64_t* full = reinterpret_cast<uint64_t*>(scales + kStages * Shape::kStageScales);
  uint64_t* empty = full + kStages;
  int* starts = reinterpret_cast<int*>(empty + kStages);
  int* tiles = starts + kMaxGroups + 2;

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31, group_of_warps = warp / 4;
  const int rank = static_cast<int>(ptx::cluster_rank());
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&map_a);
    ptx::prefetch_map(&map_b);
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(full + s, 1 + Shape::kScaleWarps);
      ptx::barrier_init(empty + s, 8 * kCluster);
    }
    ptx::fence_barrier_init();
  }
  if constexpr (MODE != Mode::dense) {
    if (warp == 1) scan_groups<MODE, BM>(p, starts, tiles);
  }
  __syncthreads();
  ptx::cluster_sync();

  Scheduler<MODE, BM, BK> schedule(p, starts, tiles, rank);
  Tile t;
  int stage = 0;
  uint32_t phase = 0;
  auto advance = [&] {
    if (++stage == kStages) stage = 0, phase ^= 1;
  };

  if (group_of_warps == 2) {
    ptx::registers_down<40>();
    if (warp == 8 && lane == 0) {
      while (schedule.next(t)) {
        const int b_row = MODE == Mode::ragged_m ? t.group * p.N + t.col0 : t.col0;
        for (int k = t.k0; k < t.k1; ++k, advance()) {
          ptx::barrier_wait(empty + stage, phase ^ 1);
          ptx::barrier_arrive_expect(full + stage, Shape::kBytesA + Shape::kBytesB);
          uint8_t *a = smem_a + stage * Shape::kBytesA, *b = smem_b + stage * Shape::kBytesB;
          if constexpr (kMn) {
#pragma unroll
            for (int i = 0; i < BM / 64 / kCluster; ++i) {
              const int box = rank * (BM / 64 / kCluster) + i;
              ptx::tma_load_2d_multicast(a + box * 8192, &map_a, full + stage, t.row0 + box * 64, k * BK, (1 << kCluster) - 1);
            }
#pragma unroll
            for (int i = 0; i < kBlockN / 64; ++i) ptx::tma_load_2d(b + i * 8192, &map_b, full + stage, t.col0 + i * 64, k * BK);
          } else {
            constexpr int kPart = BM / kCluster;
            ptx::tma_load_2d_multicast(a + rank * kPart * kStageBytesK, &map_a, full + stage, k * BK, t.row0 + rank * kPart, (1 << kCluster) - 1);
            ptx::tma_load_2d(b, &map_b, full + stage, k * BK, b_row);
          }
        }
      }
    } else if (warp > 8 && warp <= 8 + Shape::kScaleWarps) {
      while (schedule.next(t)) {
        const float* factor = nullptr;
        if constexpr (SCALING == Scaling::block_b) {
          const int blocks_n = (p.N + 127) / 128, group = MODE == Mode::ragged_m ? min(t.group, p.groups - 1) : 0;
          factor = p.scale_b + (static_cast<int64_t>(group) * blocks_n + min(t.col0 / 128, blocks_n - 1)) * p.scale_k;
        }
        const int own = (warp - 9) * (BM / 2) + lane;
        if (warp < 11) bring_scales<BM / 64, Shape::kStageScales>(p.scale_a, factor, t.row0 + own, p.M, p, t, scales + own, full, empty, stage, phase, advance);
        else bring_scales<kBlockN / 32, Shape::kStageScales>(p.scale_b, factor, t.col0 + lane, p.N, p, t, scales + BM + lane, full, empty, stage, phase, advance);
      }
    }
  } else {
    ptx::registers_up<232>();
    const int g = group_of_warps;
    uint8_t* own_staging = staging + warp * 2048;
    const int row_in_wave = (warp & 3) * 16 + (lane >> 2);
    while (schedule.next(t)) {
      float sum[WAVES][64];
#pragma unroll
      for (int w = 0; w < WAVES; ++w)
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[w][i] = 0.f;

      auto release = [&](int s) {
        if (lane < kCluster) ptx::barrier_arrive_cluster(empty + s, lane);
      };
      int previous = -1;
      for (int k = t.k0; k < t.k1; ++k, advance()) {
        ptx::barrier_wait(full + stage, phase);
        uint8_t *a = smem_a + stage * Shape::kBytesA, *b = smem_b + stage * Shape::kBytesB;
        if constexpr (MODE == Mode::ragged_k) {
          const int low = max(t.first - k * BK, 0), high = min(t.last - k * BK, BK);
          if (low > 0 || high < BK) {  // the same in every thread of the block
            constexpr int kUnit = kMn || Shape::kFp8 ? 1 : 2;
            mask_tile<kMn>(a, BM, low * kUnit, high * kUnit, threadIdx.x, 256);
            mask_tile<kMn>(b, kBlockN, low * kUnit, high * kUnit, threadIdx.x, 256);
            ptx::fence_async_shared();
            ptx::named_barrier(1, 256);
          }
        }
        const uint64_t desc_b = kMn ? ptx::wgmma_descriptor_mn(b) : ptx::wgmma_descriptor(b);
        constexpr int kStep = kMn ? 128 : 2;  // 16 rows of 128 bytes, or 32 bytes of a row, in units of 16 bytes
        if constexpr (Shape::kFp8) {
#pragma unroll
          for (int w = 0; w < WAVES; ++w) {
            float part[64];
            const uint64_t desc_a = ptx::wgmma_descriptor(a + (w * 2 + g) * 64 * 128);
            float s0 = 0.f, s1 = 0.f;
            if constexpr (SCALING != Scaling::epilogue) {
              const float* rows = scales + stage * Shape::kStageScales + (w * 2 + g) * 64 + row_in_wave;
              s0 = rows[0], s1 = rows[8];
            }
            ptx::pin(part);
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply<OPS>(part, desc_a + i * kStep, desc_b + i * kStep, i > 0);
            ptx::wgmma_commit();
            ptx::pin(part);
            ptx::wgmma_wait<0>();
            if constexpr (SCALING == Scaling::epilogue) {
              if (w == WAVES - 1) release(stage);
#pragma unroll
              for (int i = 0; i < 64; ++i) sum[w][i] += part[i];
            } else if constexpr (SCALING == Scaling::block_b) {
              if (w == WAVES - 1) {
                __syncwarp();  // all lanes have read their scales
                release(stage);
              }
#pragma unroll
              for (int i = 0; i < 64; ++i) sum[w][i] = fmaf(part[i], (i & 2) ? s1 : s0, sum[w][i]);
            } else {
              const float2* columns = reinterpret_cast<const float2*>(scales + stage * Shape::kStageScales + BM) + (lane & 3);
#pragma unroll
              for (int j = 0; j < 16; ++j) {
                const float2 s = columns[j * 4];
                sum[w][4 * j + 0] = fmaf(part[4 * j + 0] * s.x, s0, sum[w][4 * j + 0]);
                sum[w][4 * j + 1] = fmaf(part[4 * j + 1] * s.y, s0, sum[w][4 * j + 1]);
                sum[w][4 * j + 2] = fmaf(part[4 * j + 2] * s.x, s1, sum[w][4 * j + 2]);
                sum[w][4 * j + 3] = fmaf(part[4 * j + 3] * s.y, s1, sum[w][4 * j + 3]);
              }
              if (w == WAVES - 1) {
                __syncwarp();
                release(stage);
              }
            }
          }
        } else {
          // BF16 sums stay in the tensor cores; the stage before is released when its products are done.
#pragma unroll
          for (int w = 0; w < WAVES; ++w) ptx::pin(sum[w]);
          ptx::wgmma_fence();
#pragma unroll
          for (int w = 0; w < WAVES; ++w) {
            const uint8_t* rows = a + (w * 2 + g) * 64 * 128;
            const uint64_t desc_a = kMn ? ptx::wgmma_descriptor_mn(rows) : ptx::wgmma_descriptor(rows);
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply<OPS>(sum[w], desc_a + i * kStep, desc_b + i * kStep, true);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          if (previous >= 0) release(previous);
          previous = stage;
        }
      }
      if constexpr (!Shape::kFp8) {
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int w = 0; w < WAVES; ++w) ptx::pin(sum[w]);
        if (previous >= 0) release(previous);
      }

      // Epilogue.
      if (t.k0 == t.k1 && p.accumulate) continue;
      float scale = 1.f;
      if (SCALING == Scaling::epilogue && p.scale_a && !p.scale_rows)
        scale = __ldg(p.scale_a) * __ldg(p.scale_b + (p.scale_b_groups ? min(t.group, p.groups - 1) : 0));
      if (MODE == Mode::ragged_m && t.group == p.groups) scale = 0.f;
      const int64_t base = MODE == Mode::ragged_k ? static_cast<int64_t>(t.group) * p.M * p.N : 0;
      const float* column_scales = p.scale_b;
      if (MODE == Mode::ragged_m && p.scale_rows) column_scales += static_cast<int64_t>(min(t.group, p.groups - 1)) * p.N;
      const bool zero_rows = MODE == Mode::ragged_m && t.group == p.groups;
#pragma unroll
      for (int w = 0; w < WAVES; ++w) {
        const int row0 = t.row0 + (w * 2 + g) * 64 + (warp & 3) * 16;
        auto store = [&](auto* c, auto rows) {
          store_wave<std::remove_pointer_t<decltype(c)>, decltype(rows)::value>(sum[w], own_staging, p, c + base, row0, t.row_end, t.col0, p.scale_a,
                                                                                column_scales, zero_rows ? 1.f : scale);
        };
        const bool row_scales = SCALING == Scaling::epilogue && p.scale_rows && !zero_rows;
        if (p.c_fp32) {
          if (row_scales) store(static_cast<float*>(p.c), std::true_type{});
          else store(static_cast<float*>(p.c), std::false_type{});
        } else {
          if (row_scales) store(static_cast<__nv_bfloat16*>(p.c), std::true_type{});
          else store(static_cast<__nv_bfloat16*>(p.c), std::false_type{});
        }
      }
    }
  }
  // No block leaves while its partner may still write into its shared memory or arrive at its barriers.
  __syncwarp();
  __syncthreads();
  ptx::cluster_sync();
}

template <Operands OPS, Mode MODE, Scaling SCALING, int WAVES>
cudaError_t launch_gemm(const Context& l, const CUtensorMap& a, const CUtensorMap& b, const GemmArgs& p, int64_t most_tiles) {
  using Shape = GemmShape<OPS, MODE, SCALING, WAVES>;
  auto* kernel = gemm_kernel<OPS, MODE, SCALING, WAVES>;
  static const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSmem);
  if (ready != cudaSuccess) return ready;
  const int64_t clusters = std::max<int64_t>(1, std::min<int64_t>(most_tiles, l.sms / kCluster));
  kernel<<<static_cast<unsigned>(clusters * kCluster), kGemmThreads, Shape::kSmem, l.stream>>>(a, b, p);
  return cudaGetLastError();
}

}  // namespace te
