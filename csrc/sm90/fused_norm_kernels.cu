// RMSNorm (+ residual add) + quantise. Where scales need an amax of the whole output or of its rows (current and row scaling): the rows first (h,
// rstd, and for current scaling that amax), then the quantising pass over the normalised values. Else both in one kernel, norm_cast.cuh.
#include "norm_cast.cuh"
#include "row_ring.cuh"

namespace te {

// Blocks an SM: a vector of eight, its weights and their product take 20 registers.
constexpr int row_blocks(int vectors) { return vectors <= 2 ? 4 : vectors <= 4 ? 2 : 1; }

template <int VECS, bool RESIDUAL>
using NormRing = RowRing<bf16, VECS, RESIDUAL ? 2 : 1, row_blocks(VECS)>;

// in: x (and residual). h = their sum in BF16 (RESIDUAL; else x itself), rstd of h; AMAX: stats of the normalised values, whose maximum is
// kept in registers over all rows of a block. Persistent, a row a block.
template <int VECS, bool RESIDUAL, bool AMAX>
__global__ void __launch_bounds__(kRowThreads, row_blocks(VECS))
    rows_kernel(const __grid_constant__ RowInputs<bf16> in, bf16* h, float* rstd, int64_t R, int C, float eps, const void* w, bool w_fp32,
                float* stats) {
  using Ring = NormRing<VECS, RESIDUAL>;
  static_assert(Ring::kFits);
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ uint64_t full[Ring::kStages];
  __shared__ float sums[2][kRowThreads / 32];  // in turns
  ptx::let_next_kernel_start();
  Ring ring(stages, full, in, R, C);
  Weights weights[AMAX ? VECS : 1];
  if constexpr (AMAX) {
#pragma unroll
    for (int k = 0; k < VECS; ++k) weights[k] = Weights(w, w_fp32, row_column(k), C);
  }
  Seen seen;
  int turn = 0;
  for (int64_t r = blockIdx.x; r < R; r += gridDim.x) {
    Vec8<bf16> v[VECS];
    ring.wait();
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
      ring.load(0, k, v[k]);
      if constexpr (RESIDUAL) {
        Vec8<bf16> residual;
        ring.load(1, k, residual);
        v[k].add(residual);
        v[k].store_n<true>(h + r * C + row_column(k), C - row_column(k));
      }
    }
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < VECS; ++k)
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(v[k].get(j), v[k].get(j), sum);
    const float total = block_sum_once(sum, sums[turn]);
    ring.refill(r);
    turn ^= 1;
    const float s = rsqrt_exact(total / C + eps);
    if (threadIdx.x == 0) rstd[r] = s;
    if constexpr (AMAX) {
      Vec8<bf16> y[VECS];
      uint32_t amax = 0;
#pragma unroll
      for (int k = 0; k < VECS; ++k) {
        if (row_column(k) < C) normalise(v[k], s, weights[k], y[k]);
        else y[k].zero();
#pragma unroll
        for (int i = 0; i < Elem<bf16>::kWords; ++i) amax = max_word<bf16>(amax, abs_word<bf16>(y[k].w[i]));
      }
      if (fold_word<bf16>(amax) >= Elem<bf16>::kInf) seen.nonfinite += count_nonfinite<bf16>(y);
      seen.amax = max_word<bf16>(seen.amax, amax);
    }
    ring.advance();
  }
  ptx::wait_for_previous_kernel();  // which zeroed stats; the cast waits for this kernel alone
  if constexpr (AMAX) {
    const uint32_t amax = __reduce_max_sync(0xffffffffu, fold_word<bf16>(seen.amax));
    add_stats(stats, Elem<bf16>::magnitude_to_float_bits(amax), seen.nonfinite, threadIdx.x & 31);
  }
}

template <int VECS, bool RESIDUAL, bool AMAX>
void launch_rows(const Context& l, const RowInputs<bf16>& in, bf16* h, float* rstd, const QuantArgs& q, float eps, const void* w, bool w_fp32) {
  constexpr int smem = NormRing<VECS, RESIDUAL>::kSmem;
  auto* kernel = rows_kernel<VECS, RESIDUAL, AMAX>;
  static std::atomic<uint64_t> allowed;
  allow_shared_memory(kernel, smem, allowed);
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(q.R, int64_t{l.sms} * row_blocks(VECS)));
  launch_overlapping(l, kernel, grid, kRowThreads, smem, in, h, rstd, q.R, static_cast<int>(q.C), eps, w, w_fp32, q.stats);
}

void norm_quantize(const Context& l, const bf16* x, int64_t stride, const bf16* residual, int64_t residual_stride, bf16* h, const void* w,
                   bool w_fp32, float* rstd, float eps, const QuantArgs& q, int64_t granularity, int64_t format) {
  if (!needs_amax_first(q, granularity))
    return norm_cast(l, {{{x, residual}, {stride, residual_stride}}, h, rstd, w, w_fp32, eps}, q, granularity, format);
  const bool current = granularity == kTensor;
  with_vectors<bf16>(q.C, true, [&](auto vecs, auto) {
    auto* launch = residual ? (current ? launch_rows<vecs.value, true, true> : launch_rows<vecs.value, true, false>)
                            : (current ? launch_rows<vecs.value, false, true> : launch_rows<vecs.value, false, false>);
    launch(l, {{x, residual}, {stride, residual_stride}}, h, rstd, q, eps, w, w_fp32);
  });
  const NormSource source{residual ? h : x, residual ? q.C : stride, rstd, w, w_fp32};
  if (granularity == kRow) quantize_by_row<kE4M3>(l, source, q, Before::kInputs);
  else if (format == kE4M3) quantize_tensor<kE4M3>(l, source, q, Before::kInputs, true);
  else quantize_tensor<kE5M2>(l, source, q, Before::kInputs, true);
}

}  // namespace te
