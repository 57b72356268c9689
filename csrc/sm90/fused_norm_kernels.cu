// RMSNorm (+ residual add) + quantise: rstd of every row first, then the quantising pass over the normalised values.
#include "block_row.cuh"
#include "fused.cuh"

namespace te {

// h = x + residual in BF16 (or x itself), rstd of h. One row a block.
template <int VECS>
__global__ void __launch_bounds__(kRowThreads) rstd_kernel(const bf16* x, int64_t stride, const bf16* residual, int64_t residual_stride, bf16* h, float* rstd,
                                                           int C, float eps) {
  __shared__ float sm[kRowThreads / 32];
  const int64_t r = blockIdx.x;
  Vec8<bf16> v[VECS], add[VECS];
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    v[k].load_n<true>(x + r * stride + row_column(k), C - row_column(k));
    if (residual) add[k].load_n<true>(residual + r * residual_stride + row_column(k), C - row_column(k));
  }
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    if (residual) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) v[k].set2(j, v[k].get(j) + add[k].get(j), v[k].get(j + 1) + add[k].get(j + 1));
      v[k].store_n<true>(h + r * C + row_column(k), C - row_column(k));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(v[k].get(j), v[k].get(j), sum);
  }
  const float s = rsqrt_exact(block_sum(sum, sm) / C + eps);
  if (threadIdx.x == 0) rstd[r] = s;
}

void norm_quantize(const Context& l, const bf16* x, int64_t stride, const bf16* residual, int64_t residual_stride, bf16* h, const NormTiles& tiles,
                   float* rstd, float eps, const QuantArgs& q, int64_t granularity, int64_t format) {
  with_vectors<bf16>(q.C, true, [&](auto vecs, auto) {
    rstd_kernel<vecs.value><<<static_cast<unsigned>(q.R), kRowThreads, 0, l.stream>>>(x, stride, residual, residual_stride, h, rstd, static_cast<int>(q.C), eps);
  });
  const NormSource source{residual ? h : x, residual ? q.C : stride, rstd, tiles.w, tiles.w_fp32};
  quantize_all<true>(l, source, ByTiles<NormTiles>{tiles}, q, granularity, format, true);
}

}  // namespace te
