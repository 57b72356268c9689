// Block scales on their way to the computing warps: a ring in shared memory of its own, four K blocks a chunk, because scales of a row lie
// K block by K block in memory and a fetch of 4 bytes costs as much as one of 16.
//
// A chunk: of every row of the tile four scales [row][4], with block_b times the factor of the tile's columns; with block_ab then the
// column scales in the order in which a thread multiplies: lane q of four holds columns 8j + 2q + {0, 1} of a product, so
// [K block][q][2j + {0, 1}], q 40 floats apart (no bank conflicts).
//
// Every thread that writes or reads scales arrives at the barriers itself: one lane after __syncwarp would order the same, but
// compute-sanitizer's racecheck follows arrivals of single threads only.
#pragma once
#include "gemm_tiles.cuh"
#include "ptx.cuh"

namespace te {

constexpr int kChunkK = 4;
constexpr int kChunks = 2;
constexpr int kColumnQuarter = 40;
constexpr int kColumnBlock = 4 * kColumnQuarter;

template <Scaling SCALING, int BM>
struct ScaleChunk {
  static constexpr int kRows = BM * kChunkK;
  static constexpr int kOther = SCALING == Scaling::block_ab ? kChunkK * kColumnBlock : 0;
  static constexpr int kFloats = SCALING == Scaling::epilogue ? 0 : kRows + kOther;
  // That fill it: two bring rows, one columns.
  static constexpr int kWarps = SCALING == Scaling::epilogue ? 0 : SCALING == Scaling::block_b ? 2 : 3;
};

// Position in a ring of N places whose barriers flip at every round.
template <int N>
struct RingPosition {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++at == N) at = 0, phase ^= 1;
  }
};

// How 1x128 scales of an operand (or the factors of 128x128 blocks: one line of them) lie: the scale of a line and a K block is
// from[line * line_step + block * block_step]. `whole`: the four of a chunk are 16 bytes on 16 bytes.
struct ScaleLines {
  const float* from;
  int line_step, block_step, last;
  bool whole;
  __device__ __forceinline__ ScaleLines(const GemmArgs& p, const float* from, int lines, bool by_block)
      : from(from), line_step(by_block ? 1 : p.scale_k), block_step(by_block ? lines : 1), last(p.scale_k - 1),
        whole(!by_block && p.scale_k % kChunkK == 0 && (reinterpret_cast<uintptr_t>(from) & 15) == 0) {}
  // Of blocks k .. k+3, the last one again past the end.
  __device__ __forceinline__ float4 four(int line, int k) const {
    const float* at = from + line * line_step;
    if (whole) return __ldg(reinterpret_cast<const float4*>(at + k));
    return make_float4(__ldg(at + k * block_step), __ldg(at + min(k + 1, last) * block_step), __ldg(at + min(k + 2, last) * block_step),
                       __ldg(at + min(k + 3, last) * block_step));
  }
};

// Two warps of the producer, `half` 0 and 1: scales of half the rows of a tile, with block_b times the factors of its columns.
template <Mode MODE, Scaling SCALING, int BM>
__device__ __forceinline__ void bring_row_scales(const GemmArgs& p, const Tile& t, int half, float* chunks, uint64_t* full, uint64_t* empty,
                                                 RingPosition<kChunks>& ring) {
  if (t.k0 == t.k1) return;  // no products, and nobody takes a chunk: k0 may lie within one
  const int own = half * (BM / 2) + (threadIdx.x & 31);
  const ScaleLines rows(p, p.scale_a, p.M, p.scale_a_by_block);
  const int blocks_n = (p.N + 127) / 128, group = MODE == Mode::ragged_m ? min(t.group, p.groups - 1) : 0;
  const ScaleLines factors(p, p.scale_b + (static_cast<int64_t>(group) * blocks_n + min(t.col0 / 128, blocks_n - 1)) * p.scale_k, 1, false);
  for (int k = t.k0 & ~(kChunkK - 1); k < t.k1; k += kChunkK, ring.advance()) {
    float4 f = make_float4(1.f, 1.f, 1.f, 1.f);
    if constexpr (SCALING == Scaling::block_b) f = factors.four(0, k);
    ptx::barrier_wait(empty + ring.at, ring.phase ^ 1);
    float4* to = reinterpret_cast<float4*>(chunks + ring.at * ScaleChunk<SCALING, BM>::kFloats) + own;
#pragma unroll 2
    for (int i = 0; i < BM / 64; ++i) {
      float4 v = rows.four(min(t.row0 + own + 32 * i, p.M - 1), k);
      if constexpr (SCALING == Scaling::block_b) v.x *= f.x, v.y *= f.y, v.z *= f.z, v.w *= f.w;
      to[32 * i] = v;
    }
    ptx::barrier_arrive(full + ring.at);
  }
}

// A third warp (block_ab): column scales, put in order.
template <Scaling SCALING, int BM>
__device__ __forceinline__ void bring_column_scales(const GemmArgs& p, const Tile& t, float* chunks, uint64_t* full, uint64_t* empty,
                                                    RingPosition<kChunks>& ring) {
  using Chunk = ScaleChunk<SCALING, BM>;
  if (t.k0 == t.k1) return;
  const int lane = threadIdx.x & 31;
  const ScaleLines columns(p, p.scale_b, p.N, p.scale_b_by_block);
  for (int k = t.k0 & ~(kChunkK - 1); k < t.k1; k += kChunkK, ring.advance()) {
    ptx::barrier_wait(empty + ring.at, ring.phase ^ 1);
    float* to = chunks + ring.at * Chunk::kFloats + Chunk::kRows + (lane >> 1 & 3) * kColumnQuarter + 2 * (lane >> 3) + (lane & 1);
#pragma unroll 2
    for (int i = 0; i < kBlockN / 32; ++i) {
      const float4 v = columns.four(min(t.col0 + 32 * i + lane, p.N - 1), k);
      to[8 * i] = v.x, to[8 * i + kColumnBlock] = v.y, to[8 * i + 2 * kColumnBlock] = v.z, to[8 * i + 3 * kColumnBlock] = v.w;
    }
    ptx::barrier_arrive(full + ring.at);
  }
}

}  // namespace te
