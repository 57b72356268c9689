// gemm_fp8, gemm_fp8_tile, gemm_bf16, grouped_gemm_fp8, grouped_gemm_fp8_wgrad, grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad: checks and dispatch.
//
// scale_kind: 0 tensor x tensor (scale_a[1], scale_b[1]; grouped: scale_b[E] or [1]), 1 row x row (scale_a[M], scale_b[N]; grouped
// scale_b[E, N]), 2 block 1x128 x 128x128 (scale_a[M, K/128], scale_b[N/128, K/128], grouped with E in front), 3 block 1x128 x
// 1x128 (scale_a[M, K/128], scale_b[N, K/128]). Scales are dequantisation multipliers (scale_inv of quantize), sizes rounded up; those of 1x128
// may also be transposes of contiguous tensors (by_block).
#include "gemm_kernels.h"
#include "host.h"
#include "tensor_map.h"

namespace te {

#define TE_GEMM_DECLARE(ops, mode, scaling)                                                                                       \
  template <>                                                                                                                    \
  cudaError_t run_gemm<Operands::ops, Mode::mode, Scaling::scaling>(const Context&, const CUtensorMap&, const CUtensorMap&,      \
                                                                    const GemmArgs&, int, int64_t);
TE_GEMM_DECLARE(e4m3_e4m3, dense, block_b)
TE_GEMM_DECLARE(e4m3_e4m3, dense, block_ab)
TE_GEMM_DECLARE(e4m3_e4m3, dense, epilogue)
TE_GEMM_DECLARE(e5m2_e4m3, dense, epilogue)
TE_GEMM_DECLARE(bf16, dense, epilogue)
TE_GEMM_DECLARE(e4m3_e4m3, ragged_m, epilogue)
TE_GEMM_DECLARE(e5m2_e4m3, ragged_m, epilogue)
TE_GEMM_DECLARE(bf16, ragged_m, epilogue)
TE_GEMM_DECLARE(bf16_b_mn, ragged_m, epilogue)
TE_GEMM_DECLARE(e4m3_e4m3, ragged_m, block_b)
TE_GEMM_DECLARE(e4m3_e4m3, ragged_k, epilogue)
TE_GEMM_DECLARE(e5m2_e4m3, ragged_k, epilogue)
TE_GEMM_DECLARE(bf16_mn, ragged_k, epilogue)
TE_GEMM_DECLARE(e4m3_e4m3, ragged_k, block_ab)

namespace {

enum ScaleKind : int { kTensorTensor = 0, kRowRow = 1, kBlockA_BlockB = 2, kBlockA_BlockA = 3 };

// What a call looks like after its tensors were checked. rows_a x k, rows_b x k; C is rows_a x rows_b (times groups).
struct Problem {
  Mode mode;
  bool fp8;
  int64_t format_a = kE4M3, scale_kind = -1;
  int64_t M, N, K, groups = 1;
  bool b_as_k_by_n = false;  // ragged_m, bf16: b is [E, K, N] in memory
};

void check_output(const TensorView& c, bool accumulate) {
  TE_CHECK(is_bf16(c) || is_f32(c), "c must be bfloat16 or float32");
  TE_CHECK(!accumulate || is_f32(c), "accumulating needs a float32 c (main_grad); a bfloat16 sum loses small gradients");
  check_contiguous(c, "c");
}

void check_formats(int64_t format_a, int64_t format_b, int64_t scale_kind) {
  TE_CHECK(format_b == kE4M3 && (format_a == kE4M3 || format_a == kE5M2),
           "formats (" << format_a << ", " << format_b << ") have no kernel; a may be e4m3 (0) or e5m2 (1), b must be e4m3 (0): put the gradient first");
  TE_CHECK(scale_kind >= 0 && scale_kind <= 3, "scale_kind " << scale_kind << " is unknown (0 to 3)");
  TE_CHECK(format_a == kE4M3 || scale_kind <= kRowRow, "block scaling takes e4m3 operands only");
}

void check_sizes(const TensorView& sizes, const TensorView& first, int64_t groups) {
  TE_CHECK(is_dtype(sizes, kDLInt, 32) || is_dtype(sizes, kDLInt, 64), "group_sizes must be int32 or int64");
  check_shape(sizes, "group_sizes", {groups});
  check_contiguous(sizes, "group_sizes");
  check_same_device(sizes, first, "group_sizes");
  TE_CHECK(groups >= 1 && groups <= kMaxGroups, groups << " groups are not supported (1 to " << kMaxGroups << ")");
}

void check_scales(const TensorView& a, const TensorView& b, const Problem& p) {
  TE_CHECK(is_f32(a) && is_f32(b), "scale_a and scale_b must be float32");
  if (p.scale_kind < kBlockA_BlockB) check_contiguous(a, "scale_a");
  if (p.scale_kind < kBlockA_BlockA) check_contiguous(b, "scale_b");
  const int64_t kb = ceil_div(p.K, 128), nb = ceil_div(p.N, 128), E = p.groups;
  const bool grouped_b = p.mode == Mode::ragged_m;
  switch (p.scale_kind) {
    case kTensorTensor:
      check_shape(a, "scale_a", {1});
      if (!(grouped_b && b.ndim() == 1 && b.size(0) == E)) check_shape(b, "scale_b", {1});
      break;
    case kRowRow:
      check_shape(a, "scale_a", {p.M});
      grouped_b ? check_shape(b, "scale_b", {E, p.N}) : check_shape(b, "scale_b", {p.N});
      break;
    case kBlockA_BlockB:
      TE_CHECK(p.mode != Mode::ragged_k, "scale_kind 2 has no wgrad; use 3 (both operands 1x128 along the tokens)");
      check_shape(a, "scale_a", {p.M, kb});
      grouped_b ? check_shape(b, "scale_b", {E, nb, kb}) : check_shape(b, "scale_b", {nb, kb});
      break;
    default:
      TE_CHECK(p.mode != Mode::ragged_m, "scale_kind 3 has no ragged-M kernel; quantise the weights in blocks of 128x128 and use 2");
      check_shape(a, "scale_a", {p.M, kb});
      check_shape(b, "scale_b", {p.N, kb});
  }
}

// 256-row tiles read less, 128-row tiles waste less: 256 when they still fill the chip twice, or when groups are long enough.
int choose_waves(const Launch& l, const Problem& p) {
  const int64_t pairs = ceil_div(p.N, kBlockN * kCluster), groups = p.mode == Mode::ragged_k ? p.groups : 1;
  if (p.mode == Mode::ragged_m && p.M / p.groups < 512) return 1;
  return ceil_div(p.M, 256) * pairs * groups >= l.sms / kCluster ? 2 : 1;
}

void run(const Launch& l, const Problem& p, const TensorView& a, const TensorView& b, const TensorView* scale_a, const TensorView* scale_b,
         const TensorView* sizes, const TensorView& c, bool accumulate, int64_t tile_rows = 0) {
  check_same_device(b, a, "b");
  check_same_device(c, a, "c");
  check_output(c, accumulate);
  constexpr int64_t kLimit = int64_t{1} << 31;
  TE_CHECK(p.M < kLimit && p.N < kLimit && p.K < kLimit && p.M * ceil_div(p.K, 128) < kLimit && p.N * ceil_div(p.K, 128) < kLimit && p.groups * p.N < kLimit,
           "problem too large: M " << p.M << ", N " << p.N << ", K " << p.K);
  GemmArgs g{};
  g.M = static_cast<int>(p.M), g.N = static_cast<int>(p.N), g.K = static_cast<int>(p.K);
  g.c = pointer<void>(c);
  g.c_fp32 = is_f32(c);
  g.accumulate = accumulate;
  g.vector_c = aligned(g.c, 16) && p.N % (g.c_fp32 ? 4 : 8) == 0;
  g.groups = static_cast<int>(p.groups);
  g.scale_k = static_cast<int>(ceil_div(p.K, 128));
  if (p.fp8) {
    check_scales(*scale_a, *scale_b, p);
    check_same_device(*scale_a, a, "scale_a");
    check_same_device(*scale_b, a, "scale_b");
    g.scale_a = pointer<const float>(*scale_a);
    g.scale_b = pointer<const float>(*scale_b);
    g.scale_rows = p.scale_kind == kRowRow;
    g.scale_a_by_block = p.scale_kind >= kBlockA_BlockB && by_block(*scale_a, "scale_a");
    g.scale_b_by_block = p.scale_kind == kBlockA_BlockA && by_block(*scale_b, "scale_b");
    g.scale_b_groups = p.mode == Mode::ragged_m && p.scale_kind == kTensorTensor && scale_b->size(0) == p.groups;
  }
  if (sizes) {
    check_sizes(*sizes, a, p.groups);
    g.sizes = pointer<const void>(*sizes);
    g.sizes64 = sizes->dtype().bits == 64;
  }
  if (p.M == 0 || p.N == 0) return;
  if (p.K == 0) {
    if (!accumulate) cudaMemsetAsync(g.c, 0, c.numel() * (c.dtype().bits / 8), l.stream);
    return;
  }
  TE_CHECK(tile_rows == 0 || tile_rows == 128 || tile_rows == 256, "tile_rows must be 0 (chosen here), 128 or 256, got " << tile_rows);
  const int waves = tile_rows ? static_cast<int>(tile_rows / 128) : choose_waves(l, p);
  const int bm = 128 * waves;
  const int element = p.fp8 ? 1 : 2;
  const bool mn = !p.fp8 && p.mode == Mode::ragged_k;
  const int64_t rows_b = p.mode == Mode::ragged_m ? p.groups * p.N : p.N;
  const CUtensorMap map_a = mn ? operand_map(pointer<void>(a), p.K, p.M, 64, element, "a") : operand_map(pointer<void>(a), p.M, p.K, bm / kCluster, element, "a");
  const CUtensorMap map_b = p.b_as_k_by_n ? operand_map(pointer<void>(b), p.K, p.N, 64, element, "b", p.groups)
                            : mn          ? operand_map(pointer<void>(b), p.K, p.N, 64, element, "b")
                                          : operand_map(pointer<void>(b), rows_b, p.K, kBlockN, element, "b");
  const int64_t pairs = ceil_div(p.N, kBlockN * kCluster);
  const int64_t row_tiles = ceil_div(p.M, bm) + (p.mode == Mode::ragged_m ? p.groups + 1 : 0);  // each group may end inside a tile
  const int64_t tiles = row_tiles * pairs * (p.mode == Mode::ragged_k ? p.groups : 1);
  TE_CHECK(tiles < kLimit, "problem too large: " << tiles << " tiles");
  const bool e5m2 = p.format_a == kE5M2;
  auto call = [&](auto kernel) {
    const cudaError_t status = kernel(l, map_a, map_b, g, waves, tiles);
    if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "gemm did not launch: " << cudaGetErrorString(status);
  };
  using O = Operands;
  using S = Scaling;
  if (p.mode == Mode::dense) {
    if (!p.fp8) call(run_gemm<O::bf16, Mode::dense, S::epilogue>);
    else if (p.scale_kind == kBlockA_BlockB) call(run_gemm<O::e4m3_e4m3, Mode::dense, S::block_b>);
    else if (p.scale_kind == kBlockA_BlockA) call(run_gemm<O::e4m3_e4m3, Mode::dense, S::block_ab>);
    else if (e5m2) call(run_gemm<O::e5m2_e4m3, Mode::dense, S::epilogue>);
    else call(run_gemm<O::e4m3_e4m3, Mode::dense, S::epilogue>);
  } else if (p.mode == Mode::ragged_m) {
    if (p.b_as_k_by_n) call(run_gemm<O::bf16_b_mn, Mode::ragged_m, S::epilogue>);
    else if (!p.fp8) call(run_gemm<O::bf16, Mode::ragged_m, S::epilogue>);
    else if (p.scale_kind == kBlockA_BlockB) call(run_gemm<O::e4m3_e4m3, Mode::ragged_m, S::block_b>);
    else if (e5m2) call(run_gemm<O::e5m2_e4m3, Mode::ragged_m, S::epilogue>);
    else call(run_gemm<O::e4m3_e4m3, Mode::ragged_m, S::epilogue>);
  } else {
    if (!p.fp8) call(run_gemm<O::bf16_mn, Mode::ragged_k, S::epilogue>);
    else if (p.scale_kind == kBlockA_BlockA) call(run_gemm<O::e4m3_e4m3, Mode::ragged_k, S::block_ab>);
    else if (e5m2) call(run_gemm<O::e5m2_e4m3, Mode::ragged_k, S::epilogue>);
    else call(run_gemm<O::e4m3_e4m3, Mode::ragged_k, S::epilogue>);
  }
}

void check_k(int64_t k, int64_t multiple, const char* what) {
  TE_CHECK(k % multiple == 0, what << " " << k << " must be a multiple of " << multiple << " (rows of 16 bytes for the copy engine)");
}

void check_matrix(const TensorView& t, const char* name, int ndim) {
  TE_CHECK(t.ndim() == ndim, name << " must have " << ndim << " dimensions, got " << shape_text(t));
  check_contiguous(t, name);
}

// a[M,K], b[N,K] FP8 -> c[M,N] bf16 or fp32.
// tile_rows: 0 lets the library choose; 128 or 256 forces the tile, for a caller that measures.
void gemm_fp8_tile(TensorView a, TensorView b, TensorView scale_a, TensorView scale_b, TensorView c, int64_t format_a, int64_t format_b,
                   int64_t scale_kind, int64_t accumulate, int64_t tile_rows) {
  const Launch l(a);
  check_formats(format_a, format_b, scale_kind);
  check_matrix(a, "a", 2);
  check_matrix(b, "b", 2);
  check_fp8(a, "a", format_a);
  check_fp8(b, "b", format_b);
  Problem p{Mode::dense, true, format_a, scale_kind, a.size(0), b.size(0), a.size(1)};
  check_shape(b, "b", {p.N, p.K});
  check_shape(c, "c", {p.M, p.N});
  check_k(p.K, 16, "K");
  run(l, p, a, b, &scale_a, &scale_b, nullptr, c, accumulate != 0, tile_rows);
}
void gemm_fp8(TensorView a, TensorView b, TensorView scale_a, TensorView scale_b, TensorView c, int64_t format_a, int64_t format_b, int64_t scale_kind,
              int64_t accumulate) {
  gemm_fp8_tile(a, b, scale_a, scale_b, c, format_a, format_b, scale_kind, accumulate, 0);
}

// a[M,K], b[N,K] bf16 -> c[M,N] bf16 or fp32.
void gemm_bf16(TensorView a, TensorView b, TensorView c, int64_t accumulate) {
  const Launch l(a);
  check_matrix(a, "a", 2);
  check_matrix(b, "b", 2);
  TE_CHECK(is_bf16(a) && is_bf16(b), "a and b must be bfloat16");
  Problem p{Mode::dense, false, kE4M3, -1, a.size(0), b.size(0), a.size(1)};
  check_shape(b, "b", {p.N, p.K});
  check_shape(c, "c", {p.M, p.N});
  check_k(p.K, 8, "K");
  run(l, p, a, b, nullptr, nullptr, nullptr, c, accumulate != 0);
}

// a[M,K] FP8, rows in E groups; b[E,N,K] FP8 -> c[M,N]; rows past the last group become 0.
void grouped_gemm_fp8(TensorView a, TensorView b, TensorView scale_a, TensorView scale_b, TensorView group_sizes, TensorView c, int64_t format_a,
                      int64_t format_b, int64_t scale_kind) {
  const Launch l(a);
  check_formats(format_a, format_b, scale_kind);
  check_matrix(a, "a", 2);
  check_matrix(b, "b", 3);
  check_fp8(a, "a", format_a);
  check_fp8(b, "b", format_b);
  Problem p{Mode::ragged_m, true, format_a, scale_kind, a.size(0), b.size(1), a.size(1), b.size(0)};
  check_shape(b, "b", {p.groups, p.N, p.K});
  check_shape(c, "c", {p.M, p.N});
  check_k(p.K, 16, "K");
  run(l, p, a, b, &scale_a, &scale_b, &group_sizes, c, false);
}

// a[M,K] bf16, rows in E groups; b[E,N,K] bf16 -> y[M,N].
void grouped_gemm(TensorView a, TensorView b, TensorView group_sizes, TensorView y) {
  const Launch l(a);
  check_matrix(a, "a", 2);
  check_matrix(b, "b", 3);
  TE_CHECK(is_bf16(a) && is_bf16(b), "a and b must be bfloat16");
  Problem p{Mode::ragged_m, false, kE4M3, -1, a.size(0), b.size(1), a.size(1), b.size(0)};
  check_shape(b, "b", {p.groups, p.N, p.K});
  check_shape(y, "y", {p.M, p.N});
  check_k(p.K, 8, "K");
  run(l, p, a, b, nullptr, nullptr, &group_sizes, y, false);
}

// dy[M,N] bf16, rows in E groups; w[E,N,K] bf16 as the forward has it -> dx[M,K]; rows past the last group become 0.
void grouped_gemm_dgrad(TensorView dy, TensorView w, TensorView group_sizes, TensorView dx) {
  const Launch l(dy);
  check_matrix(dy, "dy", 2);
  check_matrix(w, "w", 3);
  TE_CHECK(is_bf16(dy) && is_bf16(w), "dy and w must be bfloat16");
  Problem p{Mode::ragged_m, false, kE4M3, -1, dy.size(0), w.size(2), dy.size(1), w.size(0), true};
  check_shape(w, "w", {p.groups, p.K, p.N});
  check_shape(dx, "dx", {p.M, p.N});
  check_k(p.K, 8, "N");
  check_k(p.N, 8, "K");
  run(l, p, dy, w, nullptr, nullptr, &group_sizes, dx, false);
}

// Transposed copies dy_t[N,M], x_t[K,M] FP8, tokens (columns) in E groups -> dw[E,N,K] fp32 or bf16.
void grouped_gemm_fp8_wgrad(TensorView dy_t, TensorView x_t, TensorView scale_dy, TensorView scale_x, TensorView group_sizes, TensorView dw,
                            int64_t format_dy, int64_t format_x, int64_t scale_kind, int64_t accumulate) {
  const Launch l(dy_t);
  check_formats(format_dy, format_x, scale_kind);
  check_matrix(dy_t, "dy_t", 2);
  check_matrix(x_t, "x_t", 2);
  check_fp8(dy_t, "dy_t", format_dy);
  check_fp8(x_t, "x_t", format_x);
  check_matrix(dw, "dw", 3);
  Problem p{Mode::ragged_k, true, format_dy, scale_kind, dy_t.size(0), x_t.size(0), dy_t.size(1), dw.size(0)};
  check_shape(x_t, "x_t", {p.N, p.K});
  check_shape(dw, "dw", {p.groups, p.M, p.N});
  check_k(p.K, 16, "the number of tokens");
  run(l, p, dy_t, x_t, &scale_dy, &scale_x, &group_sizes, dw, accumulate != 0);
}

// dy[M,N], x[M,K] bf16, tokens (rows) in E groups -> dw[E,N,K] fp32 or bf16.
void grouped_gemm_wgrad(TensorView dy, TensorView x, TensorView group_sizes, TensorView dw, int64_t accumulate) {
  const Launch l(dy);
  check_matrix(dy, "dy", 2);
  check_matrix(x, "x", 2);
  TE_CHECK(is_bf16(dy) && is_bf16(x), "dy and x must be bfloat16");
  check_matrix(dw, "dw", 3);
  Problem p{Mode::ragged_k, false, kE4M3, -1, dy.size(1), x.size(1), dy.size(0), dw.size(0)};
  check_shape(x, "x", {p.K, p.N});
  check_shape(dw, "dw", {p.groups, p.M, p.N});
  check_k(p.M, 8, "N");
  check_k(p.N, 8, "K");
  run(l, p, dy, x, nullptr, nullptr, &group_sizes, dw, accumulate != 0);
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm_fp8, te::gemm_fp8);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm_fp8_tile, te::gemm_fp8_tile);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm_bf16, te::gemm_bf16);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm_fp8, te::grouped_gemm_fp8);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm, te::grouped_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm_dgrad, te::grouped_gemm_dgrad);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm_fp8_wgrad, te::grouped_gemm_fp8_wgrad);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm_wgrad, te::grouped_gemm_wgrad);
