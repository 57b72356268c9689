// RMSNorm (+ residual add) + quantise: the rows first (h, rstd, and for current scaling the amax of the output), then the quantising pass over
// the normalised values.
#include "block_row.cuh"
#include "fused.cuh"

namespace te {

// h = x + residual in BF16 (or x itself), rstd of h; AMAX: stats of the normalised values. One row a block.
template <int VECS, bool AMAX>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(const bf16* x, int64_t stride, const bf16* residual, int64_t residual_stride, bf16* h, float* rstd,
                                                           int C, float eps, const void* w, bool w_fp32, float* stats, int64_t keep_from,
                                                           bool early_first) {
  __shared__ float sm[kRowThreads / 32];
  __shared__ uint32_t warp_amax[kRowThreads / 32];
  const int64_t r = blockIdx.x;
  const uint64_t policy = r >= keep_from ? ptx::evict_last() : early_first ? ptx::evict_first() : ptx::evict_normal();
  ptx::let_next_kernel_start();
  Vec8<bf16> v[VECS], add[VECS];
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    v[k].load_n<true>(x + r * stride + row_column(k), C - row_column(k), policy);
    if (residual) add[k].load_n<true>(residual + r * residual_stride + row_column(k), C - row_column(k));
  }
  if (residual) {
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) v[k].set2(j, v[k].get(j) + add[k].get(j), v[k].get(j + 1) + add[k].get(j + 1));
      v[k].store_n<true>(h + r * C + row_column(k), C - row_column(k));
    }
  }
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < VECS; ++k)
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(v[k].get(j), v[k].get(j), sum);
  const float s = rsqrt_exact(block_sum(sum, sm) / C + eps);
  if (threadIdx.x == 0) rstd[r] = s;
  ptx::wait_for_previous_kernel();  // which zeroed stats; the cast waits for this kernel alone
  if constexpr (AMAX) {
    Seen seen;
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
      if (row_column(k) >= C) break;
      Vec8<bf16> y;
      normalise(v[k], s, Weights(w, w_fp32, row_column(k), C), y);
#pragma unroll
      for (int i = 0; i < Elem<bf16>::kWords; ++i) {
        const uint32_t m = abs_word<bf16>(y.w[i]);
        seen.amax = max_word<bf16>(seen.amax, m);
        seen.nonfinite += ((m & 0xffff) >= Elem<bf16>::kInf) + ((m >> 16) >= Elem<bf16>::kInf);
      }
    }
    seen.amax = fold_word<bf16>(seen.amax);
    // One comparison with the amax so far a row: most rows find a larger one there.
    const uint32_t amax = __reduce_max_sync(0xffffffffu, seen.amax);
    const bool strange = __syncthreads_or(amax >= Elem<bf16>::kInf);
    if ((threadIdx.x & 31) == 0) warp_amax[threadIdx.x >> 5] = amax;
    __syncthreads();
    if (strange) {
      add_stats(stats, Elem<bf16>::magnitude_to_float_bits(amax), seen.nonfinite, threadIdx.x & 31);
    } else if (threadIdx.x == 0) {
      uint32_t row = 0;
#pragma unroll
      for (int k = 0; k < kRowThreads / 32; ++k) row = max(row, warp_amax[k]);
      row = Elem<bf16>::magnitude_to_float_bits(row);
      uint32_t* slot = reinterpret_cast<uint32_t*>(stats);
      if (row > *reinterpret_cast<volatile uint32_t*>(slot)) atomicMax(slot, row);
    }
  }
}

void norm_quantize(const Context& l, const bf16* x, int64_t stride, const bf16* residual, int64_t residual_stride, bf16* h, const NormTiles& tiles,
                   float* rstd, float eps, const QuantArgs& q, int64_t granularity, int64_t format) {
  const bool current = granularity == kTensor && !q.scale;
  with_vectors<bf16>(q.C, true, [&](auto vecs, auto) {
    auto* kernel = current ? rows_kernel<vecs.value, true> : rows_kernel<vecs.value, false>;
    launch_overlapped(kernel, static_cast<unsigned>(q.R), kRowThreads, 0, l.stream, x, stride, residual, residual_stride, h, rstd, static_cast<int>(q.C), eps,
                      tiles.w, tiles.w_fp32, q.stats, residual ? q.R : q.R - int64_t{reuse.keep_mb} * 1000000 / (q.C * 2), reuse.early_first);
  });
  const NormSource source{residual ? h : x, residual ? q.C : stride, rstd, tiles.w, tiles.w_fp32};
  quantize_all<true>(l, source, ByTiles<NormTiles>{tiles}, q, granularity, format, residual ? Before::kInputs : Before::kPass, current);
}

}  // namespace te
