// One output tile of a matrix product (gemm_kernels.h): slices of both operands are packed as FP32 strips, then a register block of
// kRows x kCols runs over them. Fused multiply-add where the processor has it.
#include <cstdint>
#include <cstring>

#include "convert.h"
#include "gemm_kernels.h"
#include "row_kernels.h"

namespace te {
namespace TE_SIMD {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kRows = 12;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kRows = 6;
#else
constexpr int kWidth = 4, kRows = 6;
#endif
constexpr int kVectors = 2;
constexpr int kCols = kVectors * kWidth;
typedef float Vector __attribute__((vector_size(kWidth * 4)));

// strips[s][k][w]: strip s holds outer indices s*Width .. of the operand; places past `count` are 0.
template <int Width, typename T>
void pack_t(const T* p, int64_t outer, int64_t inner, int64_t count, int64_t depth, float* out) {
  for (int64_t first = 0; first < count; first += Width, out += Width * depth) {
    const int64_t n = count - first < Width ? count - first : Width;
    const T* base = p + first * outer;
    if (n < Width) memset(out, 0, sizeof(float) * Width * depth);
    if (inner == 1) {
      for (int64_t i = 0; i < n; ++i) {
        const T* __restrict__ x = base + i * outer;
        float* __restrict__ o = out + i;
        for (int64_t k = 0; k < depth; ++k) o[k * Width] = to_float(x[k]);
      }
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        const T* __restrict__ x = base + k * inner;
        float* __restrict__ o = out + k * Width;
        for (int64_t i = 0; i < n; ++i) o[i] = to_float(x[i * outer]);
      }
    }
  }
}

template <int Width>
void pack(const GemmOperand& m, int64_t k0, int64_t count, int64_t depth, float* out) {
  const int64_t skip = k0 * m.inner;
  switch (m.dtype) {
    case kRowF32: pack_t<Width>(static_cast<const float*>(m.p) + skip, m.outer, m.inner, count, depth, out); break;
    case kRowBf16: pack_t<Width>(static_cast<const bf16*>(m.p) + skip, m.outer, m.inner, count, depth, out); break;
    default: pack_t<Width>(static_cast<const f16*>(m.p) + skip, m.outer, m.inner, count, depth, out); break;
  }
}

TE_INLINE Vector load(const float* p) {
  Vector v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// c[kRows][kCols] += a strip * b strip
TE_INLINE void block(const float* __restrict__ a, const float* __restrict__ b, int64_t depth, float* __restrict__ c, int64_t c_ld) {
  Vector sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) sum[i][v] = load(c + i * c_ld + v * kWidth);
  }
  for (int64_t k = 0; k < depth; ++k, a += kRows, b += kCols) {
    Vector bv[kVectors];
    for (int v = 0; v < kVectors; ++v) bv[v] = load(b + v * kWidth);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] += a[i] * bv[v];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) memcpy(c + i * c_ld + v * kWidth, &sum[i][v], sizeof(Vector));
  }
}

template <typename T>
void store_t(const float* from, int64_t from_ld, int64_t rows, int64_t cols, bool accumulate, T* c, int64_t c_ld) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const float v = from[i * from_ld + j];
      from_float(accumulate ? to_float(c[i * c_ld + j]) + v : v, c + i * c_ld + j);
    }
  }
}

}  // namespace

void gemm_tile(const GemmTile& t, float* scratch) {
  float* a = scratch;
  float* b = a + (kGemmTile + 32) * kGemmDepth;
  float* c = b + (kGemmTile + 32) * kGemmDepth;
  const int64_t strips_a = (t.rows + kRows - 1) / kRows, strips_b = (t.cols + kCols - 1) / kCols, c_ld = strips_b * kCols;
  memset(c, 0, sizeof(float) * strips_a * kRows * c_ld);
  for (int64_t k0 = 0; k0 < t.depth; k0 += kGemmDepth) {
    const int64_t depth = t.depth - k0 < kGemmDepth ? t.depth - k0 : kGemmDepth;
    pack<kRows>(t.a, k0, t.rows, depth, a);
    pack<kCols>(t.b, k0, t.cols, depth, b);
    for (int64_t j = 0; j < strips_b; ++j) {
      for (int64_t i = 0; i < strips_a; ++i) block(a + i * kRows * depth, b + j * kCols * depth, depth, c + i * kRows * c_ld + j * kCols, c_ld);
    }
  }
  switch (t.c_dtype) {
    case kRowF32: store_t(c, c_ld, t.rows, t.cols, t.accumulate, static_cast<float*>(t.c), t.c_ld); break;
    case kRowBf16: store_t(c, c_ld, t.rows, t.cols, t.accumulate, static_cast<bf16*>(t.c), t.c_ld); break;
    default: store_t(c, c_ld, t.rows, t.cols, t.accumulate, static_cast<f16*>(t.c), t.c_ld); break;
  }
}

}  // namespace TE_SIMD
}  // namespace te
