// One row a block: 256 threads, thread t holds the vectors of eight columns t, t + 256, ... of the row in registers.
#pragma once
#include <type_traits>

#include "numeric.cuh"

namespace te {

constexpr int kRowThreads = 256;
constexpr int kMaxRowVectors = 8;
constexpr int64_t kMaxRowWidth = int64_t{kRowThreads} * 8 * kMaxRowVectors;

__device__ __forceinline__ int row_column(int k) { return (k * kRowThreads + threadIdx.x) * 8; }

__device__ __forceinline__ float rsqrt_exact(float x) { return __fdiv_rn(1.f, __fsqrt_rn(x)); }

// The two halves of a sum over the block, in the same order in every run: over the lanes of a warp, and over the sums of its warps.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}
__device__ __forceinline__ float sum_of_warps(const float* sm) {
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < kRowThreads / 32; ++k) total += sm[k];
  return total;
}

// Sum over the block; every thread gets it. sm holds one float a warp and may be used again after the next barrier of the block.
__device__ __forceinline__ float block_sum_once(float v, float* sm) {
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) sm[threadIdx.x >> 5] = v;
  __syncthreads();
  return sum_of_warps(sm);
}

// The same; sm may be used again at once.
__device__ __forceinline__ float block_sum(float v, float* sm) {
  const float total = block_sum_once(v, sm);
  __syncthreads();
  return total;
}

// Calls f(integral_constant vectors a thread, bool_constant aligned) for a row of C elements.
template <typename T, typename F>
void with_vectors(int64_t C, bool aligned_rows, F&& f) {
  const bool vec = aligned_rows && C % 8 == 0;
  const int64_t need = (C + kRowThreads * 8 - 1) / (kRowThreads * 8);
  auto pick = [&](auto n) {
    if (vec) f(n, std::true_type{});
    else f(n, std::false_type{});
  };
  if (need <= 1) pick(std::integral_constant<int, 1>{});
  else if (need <= 2) pick(std::integral_constant<int, 2>{});
  else if (need <= 4) pick(std::integral_constant<int, 4>{});
  else pick(std::integral_constant<int, 8>{});
}

}  // namespace te
