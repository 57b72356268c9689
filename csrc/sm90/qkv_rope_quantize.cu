// QKV split + rotary embedding + E4M3 cast with one scale each for q, k and v; v is written transposed as well. BF16 inputs, read once
// (current scaling: twice, for the amax first).
//
// The bytes equal those of qkv_rope followed by quantize (the rotated values are rounded to BF16 in between). The blocks of the cast have
// two kinds of work: the first ones take tokens and write q and k, the others take 128 x 128 tiles of v and write both its copies.
#include "quantize.cuh"
#include "quantize_host.h"
#include "rope.cuh"
#include "rope_host.h"

namespace te {
namespace {

constexpr int kBlocks = 3;       // blocks an SM, by registers and by the tile of v in shared memory
constexpr int kHeadsAhead = 2;   // 256 threads hold 64 heads of 128
constexpr int kMaxDim = 1024;
constexpr int kMaxRounds = 8;    // rounds of tokens a block
constexpr int kTableBytes = 16 * kQuantThreads * static_cast<int>(sizeof(float));  // table_floats of two heads or more, D <= kMaxDim

using ValueTile = QuantSmem<bf16, kGiven, true>;

struct Work {
  Rotation r;
  RopeShape shape;
  QkvRows<const bf16> qkv;
  int tokens, tokens_a_block, token_blocks;
  uint8_t *q, *k;
  float* scale_inv;    // [3]
  float* stats;        // [3, 2]
  const float* scale;  // [3]; null: from stats
  bool pow2;
  const bf16* first_v;  // head 0 of v of token 0; the next ones are v_step values apart
  int v_step;
  QuantArgs v;          // as a matrix [T, G * D]
};

// Statistics of q, k and (three PARTS) v, gathered by a thread.
template <int PARTS>
struct QkvSeen {
  Seen part[PARTS];
  __device__ __forceinline__ void add(int which, const Vec8<bf16>& a, const Vec8<bf16>& b) {
    using E = Elem<bf16>;
    const Vec8<bf16> both[2] = {a, b};
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < E::kWords; ++i) m = max_word<bf16>(m, max_word<bf16>(abs_word<bf16>(a.w[i]), abs_word<bf16>(b.w[i])));
    m = fold_word<bf16>(m);
    const int nonfinite = m >= E::kInf ? count_nonfinite<bf16>(both) : 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
      if (p == which) part[p].amax = max(part[p].amax, m), part[p].nonfinite += nonfinite;
  }
  __device__ __forceinline__ void write(float* stats) const {
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
      add_stats(stats + 2 * p, Elem<bf16>::magnitude_to_float_bits(__reduce_max_sync(0xffffffffu, part[p].amax)), part[p].nonfinite, threadIdx.x & 31);
  }
};

// amax and non-finite values of the rotated q and k and of v.
__global__ void __launch_bounds__(kQuantThreads, kBlocks) qkv_rope_amax_kernel(const __grid_constant__ Work w) {
  __shared__ __align__(16) float table[kTableBytes / sizeof(float)];
  const int first = blockIdx.x * w.tokens_a_block, H = w.qkv.layout.H, G = w.qkv.layout.G;
  QkvSeen<3> seen;
  rope_heads<bf16, true, kQuantThreads, kHeadsAhead>(
      w.r, w.shape, w.qkv, [&](int, int h, int, int, const Vec8<bf16>& a, const Vec8<bf16>& b) { seen.add((h >= H) + (h >= H + G), a, b); }, table, first,
      min(first + w.tokens_a_block, w.tokens));
  ptx::wait_for_previous_kernel();
  seen.write(w.stats);
}

__device__ __forceinline__ uint2 cast8(const Vec8<bf16>& v, float s) {
  return make_uint2(cast4<kE4M3>(v.get(0) * s, v.get(1) * s, v.get(2) * s, v.get(3) * s), cast4<kE4M3>(v.get(4) * s, v.get(5) * s, v.get(6) * s, v.get(7) * s));
}

template <bool AFTER>
__device__ __forceinline__ void cast_tokens(const Work& w, int block, float* table) {
  const int H = w.qkv.layout.H, G = w.qkv.layout.G, D = w.r.D, first = block * w.tokens_a_block;
  const Scale sq = given_scale<kE4M3>(w.scale, w.stats, w.pow2);
  const Scale sk = given_scale<kE4M3>(w.scale ? w.scale + 1 : nullptr, w.stats + 2, w.pow2);
  if (block == 0 && threadIdx.x == 0) w.scale_inv[0] = sq.inv, w.scale_inv[1] = sk.inv;
  QkvSeen<2> seen;
  rope_heads<bf16, true, kQuantThreads, kHeadsAhead>(
      w.r, w.shape, w.qkv,
      [&](int t, int h, int column, int, const Vec8<bf16>& a, const Vec8<bf16>& b) {
        const bool is_q = h < H;
        const float s = is_q ? sq.scale : sk.scale;
        uint8_t* out = (is_q ? w.q : w.k) + static_cast<int64_t>(is_q ? t * H + h : t * G + h - H) * D + column;
        *reinterpret_cast<uint2*>(out) = cast8(a, s);
        *reinterpret_cast<uint2*>(out + D / 2) = cast8(b, s);
        if constexpr (!AFTER) seen.add(!is_q, a, b);
      },
      table, first, min(first + w.tokens_a_block, w.tokens));
  if constexpr (!AFTER) {
    ptx::wait_for_previous_kernel();
    seen.write(w.stats);
  }
}

template <bool AFTER>
__device__ __forceinline__ void cast_values(const Work& w, int tile, ValueTile& sm) {
  const int tiles_c = static_cast<int>((w.v.C + kTile - 1) / kTile);
  const int64_t row0 = static_cast<int64_t>(tile / tiles_c) * kTile, col0 = tile % tiles_c * kTile;
  // Eight columns of a thread belong to one head.
  const int column = static_cast<int>(col0) + (threadIdx.x & 15) * 8, D = w.r.D;
  const PlainSource<bf16, true> source{w.first_v + column / D * w.v_step + column % D - column, w.qkv.stride_t};
  Vec8<bf16> v[8], none[8];
  load_tile(source, row0, col0, w.v.R, w.v.C, v, none);
  Seen seen;
  quantize_tile<bf16, kE4M3, kGiven, true>(v, w.v, row0, col0, given_scale<kE4M3>(w.v), sm, seen);
  if constexpr (!AFTER) {
    ptx::wait_for_previous_kernel();
    add_seen<bf16>(w.v, seen);
  }
}

// AFTER: the amax pass ran just before: its scales are waited for, and the tensor is walked from its end, which is in L2.
template <bool AFTER>
__global__ void __launch_bounds__(kQuantThreads, kBlocks) qkv_rope_cast_kernel(const __grid_constant__ Work w) {
  __shared__ __align__(16) uint8_t sm[kTableBytes > sizeof(ValueTile) ? kTableBytes : sizeof(ValueTile)];
  if (AFTER) ptx::wait_for_previous_kernel();
  const int block = blockIdx.x, tile = block - w.token_blocks;
  if (tile < 0) cast_tokens<AFTER>(w, AFTER ? w.token_blocks - 1 - block : block, reinterpret_cast<float*>(sm));
  else cast_values<AFTER>(w, AFTER ? gridDim.x - 1 - block : tile, *reinterpret_cast<ValueTile*>(sm));
}

// Divides the tokens: enough blocks to fill the GPU twice, and few rounds a block so that no block ends late.
void divide(const Context& l, Work& w) {
  const int64_t rounds = ceil_div(ceil_div(w.tokens, w.shape.tokens), static_cast<int64_t>(l.sms) * kBlocks * 2);
  w.tokens_a_block = w.shape.tokens * static_cast<int>(std::min<int64_t>(rounds, kMaxRounds));
  w.token_blocks = static_cast<int>(ceil_div(w.tokens, w.tokens_a_block));
}

// qkv[T, (H + 2G) * D] bf16, rows may be apart; scale[3] or None; q[T, H, D], k[T, G, D], v[T, G, D], v_t[G, D, T] e4m3; scale_inv[3];
// stats[3, 2]: amax (NaN kept) and number of non-finite values of the rotated q, the rotated k, and v.
void qkv_rope_quantize(TensorView qkv, TensorView positions, TensorView inv_freq, Optional<TensorView> scale, TensorView q, TensorView k, TensorView v,
                       TensorView v_t, TensorView scale_inv, TensorView stats, int64_t layout, int64_t pow2) {
  const Launch l(qkv);
  TE_CHECK(is_bf16(qkv), "qkv must be bfloat16 for the fused kernel");
  const QkvLayout heads = check_qkv(q, k, v, qkv, {"q", "k", "v", "qkv"}, layout);
  const int64_t T = q.size(0), H = heads.H, G = heads.G, D = q.size(2);
  TE_CHECK(D % 16 == 0 && D <= kMaxDim, "head dim " << D << " must be a multiple of 16 and at most " << kMaxDim << " for the fused kernel");
  const QkvRows<const bf16> rows = rows_of<const bf16>(qkv, "qkv", D, heads);
  TE_CHECK(T * H <= INT32_MAX, T << " tokens of " << H << " heads are too many");
  TE_CHECK(vectors(rows), "qkv rows must start on 16 bytes for the fused kernel");
  check_shape(v_t, "v_t", {G, D, T});
  check_shape(scale_inv, "scale_inv", {3});
  check_f32(scale_inv, "scale_inv");
  check_shape(stats, "stats", {3, 2});
  check_f32(stats, "stats");
  for (const auto& [t, name] : {std::pair{q, "q"}, {k, "k"}, {v, "v"}, {v_t, "v_t"}}) {
    check_fp8(t, name, kE4M3);
    check_same_device(t, qkv, name);
    TE_CHECK(aligned(pointer<const void>(t), 8), name << " must start on 8 bytes");
  }
  for (const auto& [t, name] : {std::pair{scale_inv, "scale_inv"}, {stats, "stats"}}) check_same_device(t, qkv, name);
  if (scale.has_value()) {
    check_shape(scale.value(), "scale", {3});
    check_f32(scale.value(), "scale");
    check_same_device(scale.value(), qkv, "scale");
  }

  const Rotation r = check_rotation(qkv, positions, inv_freq, T, D, H + G, H + G, false);
  Work w{r, RopeShape(r, kQuantThreads), rows, static_cast<int>(T)};
  w.q = pointer<uint8_t>(q), w.k = pointer<uint8_t>(k);
  w.scale_inv = pointer<float>(scale_inv), w.stats = pointer<float>(stats), w.scale = scale.has_value() ? pointer<const float>(scale.value()) : nullptr;
  w.pow2 = pow2 != 0;
  launch_overlapping(l, zero_stats_kernel<0>, 1, 6, 0, w.stats, 6, nullptr, 0, nullptr, 0, Marks{});
  if (T == 0) {
    for (int i = 0; i < 3; ++i) empty_scales_kernel<<<1, 1, 0, l.stream>>>(w.scale ? w.scale + i : nullptr, w.scale_inv + i, 1, nullptr, 0);
    return;
  }
  const int64_t first_v = heads.ratio ? heads.ratio + 1 : H + G, step_v = heads.ratio ? heads.ratio + 2 : 1;
  w.first_v = rows.p + first_v * D, w.v_step = static_cast<int>(step_v * D);
  w.v.R = T, w.v.C = G * D;
  w.v.data = pointer<uint8_t>(v), w.v.data_t = pointer<uint8_t>(v_t);
  w.v.scale_inv = w.v.scale_inv_t = w.scale_inv + 2, w.v.stats = w.stats + 4, w.v.scale = w.scale ? w.scale + 2 : nullptr;
  w.v.pow2 = w.pow2, w.v.write_stats = true, w.v.vec = true, w.v.vec_t = T % 16 == 0 && aligned(w.v.data_t, 16);

  divide(l, w);
  const unsigned blocks = static_cast<unsigned>(w.token_blocks + ceil_div(T, kTile) * ceil_div(G * D, kTile));
  if (w.scale) {
    launch_overlapping(l, qkv_rope_cast_kernel<false>, blocks, kQuantThreads, 0, w);
  } else {
    Work all = w;
    all.r.heads += heads.G;  // v, not rotated
    all.shape = RopeShape(all.r, kQuantThreads);
    divide(l, all);
    launch_overlapping(l, qkv_rope_amax_kernel, static_cast<unsigned>(all.token_blocks), kQuantThreads, 0, all);
    launch_overlapping(l, qkv_rope_cast_kernel<true>, blocks, kQuantThreads, 0, w);
  }
  TE_LAUNCHED("qkv_rope_quantize");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(qkv_rope_quantize, te::qkv_rope_quantize);
