// C[M,N] (+)= A[M,K] B[N,K]^T on the tensor cores of Hopper: one persistent, warp-specialised kernel for dense and grouped GEMM.
//
// 384 threads: warpgroups 0 and 1 compute (wgmma), warp 0 of warpgroup 2 feeds shared memory through TMA, the warps beside it bring block
// scales (gemm_scales.cuh). Two blocks form a cluster that computes two neighbouring 128-column tiles of the same rows: A is loaded
// once, half by each, and multicast to both. A tile is BM = 128 * WAVES rows x 128 columns; a stage holds 128 bytes of K (128 FP8, 64
// BF16 values) of A and B.
//
// FP8 sums stay in the tensor cores for 128 values of K only (they keep about 14 bits there), then join FP32 registers, where
// block scales are applied. A finished wave is written to C while the products of the next one run, of the next tile too.
//
// Modes. kDense. kRaggedM: rows of A and C are in E groups given by device sizes, B is [E, N, K]; rows past the last group become 0.
// kRaggedK: K (tokens) is in groups, C is [E, M, N]; stages begin at multiples of 128 bytes of K whatever the group, so scale blocks
// stay whole, and values of K outside the group are zeroed in shared memory.
// Group sizes are read on the device at the start of every block: no host synchronisation, any sizes. A negative size counts as 0,
// and groups are cut where the rows end.
#pragma once
#include "gemm_scales.cuh"
#include "gemm_store.cuh"
#include "gemm_tiles.cuh"

namespace te {

template <Operands OPS, Mode MODE, Scaling SCALING, int WAVES>
struct GemmShape {
  static constexpr bool kFp8 = OPS == Operands::e4m3_e4m3 || OPS == Operands::e5m2_e4m3;
  static constexpr bool kMnA = OPS == Operands::bf16_mn, kMnB = kMnA || OPS == Operands::bf16_b_mn;
  static constexpr int kBlockM = 128 * WAVES;
  static constexpr int kBlockK = kFp8 ? 128 : 64;
  static constexpr int kStages = WAVES == 2 ? 4 : 6;
  static constexpr int kBytesA = kBlockM * kStageBytesK, kBytesB = kBlockN * kStageBytesK;
  static constexpr int kStaging = 8 * 2048;  // epilogue, 2 KB a warp
  static constexpr int kScales = kChunks * ScaleChunk<SCALING, kBlockM>::kFloats;
  static constexpr int kBarriers = 2 * kStages + 2 * kChunks;
  static constexpr int kGroupInts = MODE == Mode::dense ? 0 : (kMaxGroups + 2) * (MODE == Mode::ragged_m ? 2 : 1);
  static constexpr int kSmem = kStages * (kBytesA + kBytesB) + kStaging + kScales * 4 + kBarriers * 8 + kGroupInts * 4;
  static_assert(kSmem <= 232448, "more shared memory than a block can have");
};

template <Operands OPS>
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  if constexpr (OPS == Operands::e4m3_e4m3) ptx::wgmma_e4m3_e4m3(d, a, b, add);
  else if constexpr (OPS == Operands::e5m2_e4m3) ptx::wgmma_e5m2_e4m3(d, a, b, add);
  else if constexpr (OPS == Operands::bf16) ptx::wgmma_bf16(d, a, b, add);
  else if constexpr (OPS == Operands::bf16_mn) ptx::wgmma_bf16_mn(d, a, b, add);
  else ptx::wgmma_bf16_b_mn(d, a, b, add);
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

// ragged_k: zeroes the values of stage k that belong to another group, in both operands. Called by both computing warpgroups.
template <Mode MODE, int BK, int BM, bool MN, int UNIT>
__device__ __forceinline__ void mask_stage(uint8_t* a, uint8_t* b, const Tile& t, int k) {
  if constexpr (MODE == Mode::ragged_k) {
    const int low = max(t.first - k * BK, 0), high = min(t.last - k * BK, BK);
    if (low > 0 || high < BK) {  // the same in every thread of the block
      mask_tile<MN>(a, BM, low * UNIT, high * UNIT, threadIdx.x, 256);
      mask_tile<MN>(b, kBlockN, low * UNIT, high * UNIT, threadIdx.x, 256);
      ptx::fence_async_shared();
      ptx::named_barrier(1, 256);
    }
  }
}

// What a thread adds to its sums: 64 products, times the block scales of its two rows (s0, s1) and, with block_ab, of its columns: the first
// 16 in `held`, kept for both waves, the others at `columns`. ODD_FIRST changes nothing but the registers that the compiler chooses.
template <Scaling SCALING, bool ODD_FIRST>
__device__ __forceinline__ void promote(float (&sum)[64], const float (&part)[64], float s0, float s1, const float4 (&held)[4],
                                        const float4* columns) {
  if constexpr (SCALING == Scaling::epilogue) {
#pragma unroll
    for (int j = 0; j < 64; ++j) {
      const int i = ODD_FIRST ? j ^ 1 : j;
      sum[i] += part[i];
    }
  } else if constexpr (SCALING == Scaling::block_b) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = fmaf(part[i], (i & 2) ? s1 : s0, sum[i]);
  } else {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const float4 s = t < 4 ? held[t % 4] : columns[t];
      const float column[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = 8 * t + j;
        sum[i] = fmaf(part[i] * column[(j & 1) + (j >> 2) * 2], (j & 2) ? s1 : s0, sum[i]);
      }
    }
  }
}

template <Operands OPS, Mode MODE, Scaling SCALING, int WAVES>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const __grid_constant__ GemmArgs p) {
  using Shape = GemmShape<OPS, MODE, SCALING, WAVES>;
  constexpr int kStages = Shape::kStages, BM = Shape::kBlockM, BK = Shape::kBlockK;
  constexpr bool kMnA = Shape::kMnA, kMnB = Shape::kMnB, kBlockScales = SCALING != Scaling::epilogue;
  constexpr bool kOddFirst = MODE == Mode::dense;  // the compiler then puts a sum and its product into different register banks
  using Chunk = ScaleChunk<SCALING, BM>;

  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* smem_a = smem;
  uint8_t* smem_b = smem_a + kStages * Shape::kBytesA;
  uint8_t* staging = smem_b + kStages * Shape::kBytesB;
  float* chunks = reinterpret_cast<float*>(staging + Shape::kStaging);
  uint64_t* full = reinterpret_cast<uint64_t*>(chunks + Shape::kScales);
  uint64_t *empty = full + kStages, *chunk_full = empty + kStages, *chunk_empty = chunk_full + kChunks;
  int* starts = reinterpret_cast<int*>(chunk_empty + kChunks);
  int* tiles = starts + kMaxGroups + 2;

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31, group_of_warps = warp / 4;
  const int rank = static_cast<int>(ptx::cluster_rank());
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&map_a);
    ptx::prefetch_map(&map_b);
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(full + s, 1);
      ptx::barrier_init(empty + s, 8 * kCluster);
    }
    for (int s = 0; s < (kBlockScales ? kChunks : 0); ++s) {
      ptx::barrier_init(chunk_full + s, 32 * Chunk::kWarps);
      ptx::barrier_init(chunk_empty + s, 256);
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
  RingPosition<kStages> ring;
  RingPosition<kChunks> scale_ring;

  if (group_of_warps == 2) {
    ptx::registers_down<40>();
    if (warp == 8 && lane == 0) {
      while (schedule.next(t)) {
        const int b_row = MODE == Mode::ragged_m ? t.group * p.N + t.col0 : t.col0;
        for (int k = t.k0; k < t.k1; ++k, ring.advance()) {
          ptx::barrier_wait(empty + ring.at, ring.phase ^ 1);
          ptx::barrier_arrive_expect(full + ring.at, Shape::kBytesA + Shape::kBytesB);
          uint8_t *a = smem_a + ring.at * Shape::kBytesA, *b = smem_b + ring.at * Shape::kBytesB;
          if constexpr (kMnA) {
#pragma unroll
            for (int i = 0; i < BM / 64 / kCluster; ++i) {
              const int box = rank * (BM / 64 / kCluster) + i;
              ptx::tma_load_2d_multicast(a + box * 8192, &map_a, full + ring.at, t.row0 + box * 64, k * BK, (1 << kCluster) - 1);
            }
          } else {
            constexpr int kPart = BM / kCluster;
            ptx::tma_load_2d_multicast(a + rank * kPart * kStageBytesK, &map_a, full + ring.at, k * BK, t.row0 + rank * kPart, (1 << kCluster) - 1);
          }
          if constexpr (kMnB) {
#pragma unroll
            for (int i = 0; i < kBlockN / 64; ++i) {
              // Of one group: a box past its K brings zeros, not the values of the next group.
              if constexpr (MODE == Mode::ragged_m) ptx::tma_load_3d(b + i * 8192, &map_b, full + ring.at, t.col0 + i * 64, k * BK, t.group);
              else ptx::tma_load_2d(b + i * 8192, &map_b, full + ring.at, t.col0 + i * 64, k * BK);
            }
          } else {
            ptx::tma_load_2d(b, &map_b, full + ring.at, k * BK, b_row);
          }
        }
      }
    } else if (kBlockScales && (warp == 9 || warp == 10)) {
      while (schedule.next(t)) bring_row_scales<MODE, SCALING, BM>(p, t, warp - 9, chunks, chunk_full, chunk_empty, scale_ring);
    } else if (SCALING == Scaling::block_ab && warp == 11) {
      while (schedule.next(t)) bring_column_scales<SCALING, BM>(p, t, chunks, chunk_full, chunk_empty, scale_ring);
    }
  } else {
    ptx::registers_up<232>();
    const int g = group_of_warps;
    uint8_t* own_staging = staging + warp * 2048;
    const int row_in_wave = (warp & 3) * 16 + (lane >> 2);
    auto release = [&](int s) {
      if (lane < kCluster) ptx::barrier_arrive_cluster(empty + s, lane);
    };
    float sum[WAVES][64];
    auto store = [&](const Tile& of, auto wave) {
      store_tile_wave<MODE, SCALING>(sum[wave.value], own_staging, p, of, (wave.value * 2 + g) * 64, warp & 3);
    };
    using First = std::integral_constant<int, 0>;
    using Last = std::integral_constant<int, WAVES - 1>;
    Tile unfinished;  // its last wave is in `sum` still
    bool pending = false;
    while (true) {
      const bool more = schedule.next(t);
      if (!more || t.k0 == t.k1) {
        if (pending) store(unfinished, Last{});
        pending = false;
        if (!more) break;
        if (!p.accumulate) store_zeros<MODE, BM>(p, t);
        continue;
      }
      if constexpr (Shape::kFp8) {
        // One K block. While the first products of a tile run, the last wave of the tile before goes out; while the last ones run,
        // the first wave of this tile.
        auto step = [&](int k, auto first, auto last) {
          ptx::barrier_wait(full + ring.at, ring.phase);
          uint8_t *a = smem_a + ring.at * Shape::kBytesA, *b = smem_b + ring.at * Shape::kBytesB;
          if constexpr (first.value || last.value) mask_stage<MODE, BK, BM, kMnA, 1>(a, b, t, k);
          const uint64_t desc_b = ptx::wgmma_descriptor(b);
          const float* chunk = chunks + scale_ring.at * Chunk::kFloats;
          const int in_chunk = k % kChunkK;
          if (kBlockScales && (first.value || in_chunk == 0)) ptx::barrier_wait(chunk_full + scale_ring.at, scale_ring.phase);
          const float4* columns = reinterpret_cast<const float4*>(chunk + Chunk::kRows + in_chunk * kColumnBlock + (lane & 3) * kColumnQuarter);
          float4 held[4] = {};
          if constexpr (SCALING == Scaling::block_ab) {
#pragma unroll
            for (int i = 0; i < 4; ++i) held[i] = columns[i];
          }
#pragma unroll
          for (int w = 0; w < WAVES; ++w) {
            float part[64];
            const uint64_t desc_a = ptx::wgmma_descriptor(a + (w * 2 + g) * 64 * 128);
            float s0 = 0.f, s1 = 0.f;
            if constexpr (kBlockScales) {
              const float* rows = chunk + ((w * 2 + g) * 64 + row_in_wave) * kChunkK + in_chunk;
              s0 = rows[0], s1 = rows[8 * kChunkK];
            }
            ptx::pin(part);
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply<OPS>(part, desc_a + i * 2, desc_b + i * 2, i > 0);
            ptx::wgmma_commit();
            if constexpr (first.value) {
              if (w == 0 && pending) store(unfinished, Last{});
#pragma unroll
              for (int i = 0; i < 64; ++i) sum[w][i] = 0.f;
            }
            if constexpr (last.value) {
              if (w == WAVES - 1 && WAVES > 1) store(t, First{});
            }
            ptx::pin(part);
            ptx::wgmma_wait<0>();
            if (w == WAVES - 1) release(ring.at);
            promote<SCALING, kOddFirst>(sum[w], part, s0, s1, held, columns);
          }
          if (kBlockScales && (k == t.k1 - 1 || in_chunk == kChunkK - 1)) {
            ptx::barrier_arrive(chunk_empty + scale_ring.at);
            scale_ring.advance();
          }
          ring.advance();
        };
        step(t.k0, std::true_type{}, std::false_type{});
        for (int k = t.k0 + 1; k < t.k1 - 1; ++k) step(k, std::false_type{}, std::false_type{});
        if (t.k1 - t.k0 > 1) step(t.k1 - 1, std::false_type{}, std::true_type{});
        else if (WAVES > 1) store(t, First{});
        unfinished = t, pending = true;
      } else {
        // BF16 sums stay in the tensor cores; the stage before is released when its products are done.
#pragma unroll
        for (int w = 0; w < WAVES; ++w)
#pragma unroll
          for (int i = 0; i < 64; ++i) sum[w][i] = 0.f;
        int previous = -1;
        for (int k = t.k0; k < t.k1; ++k, ring.advance()) {
          ptx::barrier_wait(full + ring.at, ring.phase);
          uint8_t *a = smem_a + ring.at * Shape::kBytesA, *b = smem_b + ring.at * Shape::kBytesB;
          mask_stage<MODE, BK, BM, kMnA, kMnA ? 1 : 2>(a, b, t, k);
          const uint64_t desc_b = kMnB ? ptx::wgmma_descriptor_mn(b) : ptx::wgmma_descriptor(b);
          // 16 rows of 128 bytes, or 32 bytes of a row, in units of 16 bytes.
          constexpr int kStepA = kMnA ? 128 : 2, kStepB = kMnB ? 128 : 2;
#pragma unroll
          for (int w = 0; w < WAVES; ++w) ptx::pin(sum[w]);
          ptx::wgmma_fence();
#pragma unroll
          for (int w = 0; w < WAVES; ++w) {
            const uint8_t* rows = a + (w * 2 + g) * 64 * 128;
            const uint64_t desc_a = kMnA ? ptx::wgmma_descriptor_mn(rows) : ptx::wgmma_descriptor(rows);
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply<OPS>(sum[w], desc_a + i * kStepA, desc_b + i * kStepB, true);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          if (previous >= 0) release(previous);
          previous = ring.at;
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int w = 0; w < WAVES; ++w) ptx::pin(sum[w]);
        release(previous);
        store(t, First{});
        if constexpr (WAVES > 1) store(t, Last{});
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
  static std::atomic<uint64_t> allowed;
  allow_shared_memory(kernel, Shape::kSmem, allowed);
  const int64_t clusters = std::max<int64_t>(1, std::min<int64_t>(most_tiles, l.sms / kCluster));
  kernel<<<static_cast<unsigned>(clusters * kCluster), kGemmThreads, Shape::kSmem, l.stream>>>(a, b, p);
  return cudaGetLastError();
}

}  // namespace te
