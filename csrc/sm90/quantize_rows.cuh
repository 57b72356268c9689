// Row scaling without a transposed copy: one read, the row waits in registers for its scale. One row a block.
#pragma once
#include "block_row.cuh"
#include "quantize_tile.cuh"

namespace te {

template <typename T, int FMT, int VECS, bool VEC>
__global__ void __launch_bounds__(kRowThreads) quantize_rows_kernel(const T* x, int64_t stride, const __grid_constant__ QuantArgs q) {
  using E = Elem<T>;
  __shared__ uint32_t warp_amax[kRowThreads / 32];
  __shared__ int nonfinite;
  const int64_t r = blockIdx.x;
  const int C = static_cast<int>(q.C);
  Vec8<T> v[VECS];
#pragma unroll
  for (int k = 0; k < VECS; ++k) v[k].template load_n<VEC>(x + r * stride + row_column(k), C - row_column(k));
  uint32_t m = 0;
#pragma unroll
  for (int k = 0; k < VECS; ++k)
#pragma unroll
    for (int w = 0; w < E::kWords; ++w) m = max_word<T>(m, abs_word<T>(v[k].w[w]));
  m = fold_word<T>(m);
  if (threadIdx.x == 0) nonfinite = 0;
  const uint32_t warp_max = __reduce_max_sync(0xffffffffu, m);
  if ((threadIdx.x & 31) == 0) warp_amax[threadIdx.x >> 5] = warp_max;
  __syncthreads();
  uint32_t row_max = 0;
#pragma unroll
  for (int w = 0; w < kRowThreads / 32; ++w) row_max = max(row_max, warp_amax[w]);
  const uint32_t amax = E::magnitude_to_float_bits(row_max);
  const Scale s = scale_from_amax(amax, kFormatMax<FMT>, q.pow2);
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int c = row_column(k);
    if (c >= C) break;
    const uint32_t low = cast4<FMT>(v[k].get(0) * s.scale, v[k].get(1) * s.scale, v[k].get(2) * s.scale, v[k].get(3) * s.scale);
    const uint32_t high = cast4<FMT>(v[k].get(4) * s.scale, v[k].get(5) * s.scale, v[k].get(6) * s.scale, v[k].get(7) * s.scale);
    store_bytes(q.data + r * q.C + c, make_uint2(low, high), C - c, q.vec);
  }
  if (amax >= kFloatInf) {
    int n = 0;
#pragma unroll
    for (int k = 0; k < VECS; ++k)
#pragma unroll
      for (int j = 0; j < 8; ++j) n += (__float_as_uint(v[k].get(j)) & 0x7fffffffu) >= kFloatInf;
    if (n) atomicAdd(&nonfinite, n);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    static_cast<float*>(q.scale_inv)[r] = s.inv;
    uint32_t* slot = reinterpret_cast<uint32_t*>(q.stats);
    if (amax > *reinterpret_cast<volatile uint32_t*>(slot)) atomicMax(slot, amax);  // most rows find a larger one there
    if (amax >= kFloatInf) atomicAdd(q.stats + 1, static_cast<float>(nonfinite));
  }
}

template <typename T>
void quantize_rows(const Context& l, const T* x, int64_t stride, bool vec, const QuantArgs& q, int64_t format) {
  with_vectors<T>(q.C, vec, [&](auto vecs, auto aligned_rows) {
    auto kernel = format == kE4M3 ? quantize_rows_kernel<T, kE4M3, vecs.value, aligned_rows.value> : quantize_rows_kernel<T, kE5M2, vecs.value, aligned_rows.value>;
    kernel<<<static_cast<unsigned>(q.R), kRowThreads, 0, l.stream>>>(x, stride, q);
  });
}

}  // namespace te
