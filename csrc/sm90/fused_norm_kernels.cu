// RMSNorm (+ residual add) + quantise: the rows first (h, rstd, and for current scaling the amax of the output), then the quantising pass over
// the normalised values.
#include "block_row.cuh"
#include "fused.cuh"

namespace te {

// Blocks an SM whose registers hold two rows each.
constexpr int row_blocks(int vectors, bool residual) {
  if (vectors <= 2) return residual ? 4 : 6;
  if (vectors <= 4) return residual ? 2 : 3;
  return residual ? 1 : 2;
}

// h = x + residual in BF16 (RESIDUAL; else x itself), rstd of h; AMAX: stats of the normalised values. Persistent, a row a block: the next
// row is on its way while one is summed, and the maximum is kept in registers over all rows of a block.
template <int VECS, bool RESIDUAL, bool AMAX>
__global__ void __launch_bounds__(kRowThreads, row_blocks(VECS, RESIDUAL))
    rows_kernel(const bf16* x, int64_t stride, const bf16* residual, int64_t residual_stride, bf16* h, float* rstd, int64_t R, int C, float eps,
                const void* w, bool w_fp32, float* stats, int64_t keep_from, bool early_first) {
  __shared__ float sums[2][kRowThreads / 32];  // in turns
  struct Row {
    Vec8<bf16> x[VECS], residual[RESIDUAL ? VECS : 1];
  };
  auto load = [&](int64_t r, Row& row) {
    const uint64_t policy = r >= keep_from ? ptx::evict_last() : early_first ? ptx::evict_first() : ptx::evict_normal();
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
      row.x[k].load_n<true>(x + r * stride + row_column(k), C - row_column(k), policy);
      if constexpr (RESIDUAL) row.residual[k].load_n<true>(residual + r * residual_stride + row_column(k), C - row_column(k));
    }
  };
  ptx::let_next_kernel_start();
  Row next;
  load(blockIdx.x, next);
  Seen seen;
  int turn = 0;
  for (int64_t r = blockIdx.x; r < R; r += gridDim.x) {
    Row row = next;
    if (r + gridDim.x < R) load(r + gridDim.x, next);
    auto& v = row.x;
    if constexpr (RESIDUAL) {
#pragma unroll
      for (int k = 0; k < VECS; ++k) {
        v[k].add(row.residual[k]);
        v[k].store_n<true>(h + r * C + row_column(k), C - row_column(k));
      }
    }
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < VECS; ++k)
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(v[k].get(j), v[k].get(j), sum);
    const float s = rsqrt_exact(block_sum_once(sum, sums[turn]) / C + eps);
    turn ^= 1;
    if (threadIdx.x == 0) rstd[r] = s;
    if constexpr (AMAX) {
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
    }
  }
  ptx::wait_for_previous_kernel();  // which zeroed stats; the cast waits for this kernel alone
  if constexpr (AMAX) {
    const uint32_t amax = __reduce_max_sync(0xffffffffu, fold_word<bf16>(seen.amax));
    add_stats(stats, Elem<bf16>::magnitude_to_float_bits(amax), seen.nonfinite, threadIdx.x & 31);
  }
}

template <int VECS, bool RESIDUAL>
void launch_rows(const Context& l, const bf16* x, int64_t stride, const bf16* residual, int64_t residual_stride, bf16* h, float* rstd, const QuantArgs& q,
                 float eps, const NormTiles& tiles, bool amax) {
  auto* kernel = amax ? rows_kernel<VECS, RESIDUAL, true> : rows_kernel<VECS, RESIDUAL, false>;
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(q.R, int64_t{l.sms} * row_blocks(VECS, RESIDUAL)));
  const int64_t keep_from = RESIDUAL ? q.R : q.R - int64_t{reuse.keep_mb} * 1000000 / (q.C * 2);
  launch_overlapping(l, kernel, grid, kRowThreads, 0, x, stride, residual, residual_stride, h, rstd, q.R, static_cast<int>(q.C), eps, tiles.w,
                    tiles.w_fp32, q.stats, keep_from, reuse.early_first);
}

void norm_quantize(const Context& l, const bf16* x, int64_t stride, const bf16* residual, int64_t residual_stride, bf16* h, const NormTiles& tiles,
                   float* rstd, float eps, const QuantArgs& q, int64_t granularity, int64_t format) {
  const bool current = granularity == kTensor && !q.scale;
  with_vectors<bf16>(q.C, true, [&](auto vecs, auto) {
    auto* launch = residual ? launch_rows<vecs.value, true> : launch_rows<vecs.value, false>;
    launch(l, x, stride, residual, residual_stride, h, rstd, q, eps, tiles, current);
  });
  const NormSource source{residual ? h : x, residual ? q.C : stride, rstd, tiles.w, tiles.w_fp32};
  quantize_all<true>(l, source, ByTiles<NormTiles>{tiles}, q, granularity, format, residual ? Before::kInputs : Before::kPass, current);
}

}  // namespace te
