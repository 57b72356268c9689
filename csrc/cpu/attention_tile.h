// Vector helpers of the attention kernels: one register-blocked matrix product, exp2, transposes, conversions.
// Included by attention_*.simd.cpp alone; everything lies in namespace TE_SIMD and is local to the file that includes it.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && (defined(__AVX2__) || defined(__AVX512F__))
#include <immintrin.h>
#endif

#include "attention.h"

namespace te {
namespace TE_SIMD {
namespace {

// ---- vectors --------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 8, kTileVectors = 2;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileRows = 6, kTileVectors = 2;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTileRows = 4, kTileVectors = 4;
#else
constexpr int kLanes = 4, kTileRows = 4, kTileVectors = 2;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecMemory __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecUint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecShort __attribute__((vector_size(kLanes * 2)));
typedef uint16_t VecShortMemory __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

inline Vec load(const float* p) { return *reinterpret_cast<const VecMemory*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecMemory*>(p) = v; }
inline Vec splat(float x) { return Vec{} + x; }
inline VecInt splat_int(int32_t x) { return VecInt{} + x; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// 2^x to 1e-7 relative: exactly 1 at 0, exactly 0 from -127 down (-inf included), NaN for NaN.
inline Vec exp2(Vec x) {
  x = x < -127.0f ? splat(-127.0f) : x;
  x = x > 127.0f ? splat(127.0f) : x;
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which then sits in the low bits
  const Vec shifted = x + round;
  const Vec f = x - (shifted - round);
  Vec p = splat(0.00015335358f);
  p = fma(p, f, splat(0.0013398874f));
  p = fma(p, f, splat(0.009618437f));
  p = fma(p, f, splat(0.055503324f));
  p = fma(p, f, splat(0.24022648f));
  p = fma(p, f, splat(0.6931472f));
  p = fma(p, f, splat(1.0f));
  const VecInt power = ((VecInt)shifted << 23) + (127 << 23);
  return p * (Vec)power;
}

inline float sum_lanes(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

// count is a multiple of the vector length.
inline float dot(const float* a, const float* b, int64_t count) {
  Vec sum{};
  for (int64_t i = 0; i < count; i += kLanes) sum = fma(load(a + i), load(b + i), sum);
  return sum_lanes(sum);
}

// ---- matrix product -------------------------------------------------------------------------------------------------

enum class Start { zero, add, scaled_add };  // C starts from 0, from C, from C times a factor for each column

template <int Rows, int Vectors, Start start>
inline __attribute__((always_inline)) void micro_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_depth,
                                                      const float* b, int64_t ldb, float* c, int64_t ldc,
                                                      const float* factor) {
  Vec acc[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < Vectors; ++n) {
      if (start == Start::zero) acc[r][n] = Vec{};
      if (start == Start::add) acc[r][n] = load(c + r * ldc + n * kLanes);
      if (start == Start::scaled_add) acc[r][n] = load(c + r * ldc + n * kLanes) * load(factor + n * kLanes);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec column[Vectors];
#pragma GCC unroll 4
    for (int n = 0; n < Vectors; ++n) column[n] = load(b + n * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec row = splat(a[r * a_row]);
#pragma GCC unroll 4
      for (int n = 0; n < Vectors; ++n) acc[r][n] = fma(row, column[n], acc[r][n]);
    }
    a += a_depth;
    b += ldb;
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < Vectors; ++n) store(c + r * ldc + n * kLanes, acc[r][n]);
  }
}

template <int Vectors, Start start>
inline void micro_column(int64_t m, int64_t depth, const float* a, int64_t a_row, int64_t a_depth, const float* b,
                         int64_t ldb, float* c, int64_t ldc, const float* factor) {
  int64_t r = 0;
  for (; r + kTileRows <= m; r += kTileRows) {
    micro_tile<kTileRows, Vectors, start>(depth, a + r * a_row, a_row, a_depth, b, ldb, c + r * ldc, ldc, factor);
  }
  for (; r + 4 <= m; r += 4) {
    micro_tile<4, Vectors, start>(depth, a + r * a_row, a_row, a_depth, b, ldb, c + r * ldc, ldc, factor);
  }
  for (; r < m; ++r) {
    micro_tile<1, Vectors, start>(depth, a + r * a_row, a_row, a_depth, b, ldb, c + r * ldc, ldc, factor);
  }
}

// C[m, n] = start + sum over k < depth of A(m, k) B[k, n], with A(m, k) at a[m * a_row + k * a_depth]. n is a multiple of the
// vector length. The sum runs over k in order for every element, so tiling does not show in the bits.
template <Start start>
inline void multiply(int64_t m, int64_t n, int64_t depth, const float* a, int64_t a_row, int64_t a_depth, const float* b,
                     int64_t ldb, float* c, int64_t ldc, const float* factor = nullptr) {
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= n; column += kTileVectors * kLanes) {
    micro_column<kTileVectors, start>(m, depth, a, a_row, a_depth, b + column, ldb, c + column, ldc, factor + column);
  }
  for (; column < n; column += kLanes) {
    micro_column<1, start>(m, depth, a, a_row, a_depth, b + column, ldb, c + column, ldc, factor + column);
  }
}

// ---- transposes -----------------------------------------------------------------------------------------------------

#define TE_LOW(l, k) (((l) & (k)) ? kLanes + (l) - (k) : (l))
#define TE_HIGH(l, k) (((l) & (k)) ? kLanes + (l) : (l) + (k))
#define TE_LIST4(F, k) F(0, k), F(1, k), F(2, k), F(3, k)
#define TE_LIST8(F, k) TE_LIST4(F, k), F(4, k), F(5, k), F(6, k), F(7, k)
#define TE_LIST16(F, k) TE_LIST8(F, k), F(8, k), F(9, k), F(10, k), F(11, k), F(12, k), F(13, k), F(14, k), F(15, k)
#if defined(__AVX512F__)
#define TE_LIST TE_LIST16
#elif defined(__AVX2__)
#define TE_LIST TE_LIST8
#else
#define TE_LIST TE_LIST4
#endif

#define TE_SWAP_STAGE(k)                                                              \
  _Pragma("GCC unroll 16") for (int r = 0; r < kLanes; ++r) {                         \
    if ((r & (k)) == 0) {                                                             \
      const Vec low = v[r], high = v[r + (k)];                                        \
      v[r] = __builtin_shufflevector(low, high, TE_LIST(TE_LOW, k));                  \
      v[r + (k)] = __builtin_shufflevector(low, high, TE_LIST(TE_HIGH, k));           \
    }                                                                                 \
  }

// to[c, r] = from[r, c] for one square of kLanes x kLanes.
inline void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Vec v[kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) v[r] = load(from + r * from_stride);
  TE_SWAP_STAGE(1)
  TE_SWAP_STAGE(2)
#if defined(__AVX2__) || defined(__AVX512F__)
  TE_SWAP_STAGE(4)
#endif
#if defined(__AVX512F__)
  TE_SWAP_STAGE(8)
#endif
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) store(to + r * to_stride, v[r]);
}

// Both sizes are multiples of the vector length.
inline void transpose(int64_t rows, int64_t columns, const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      transpose_square(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    }
  }
}

// ---- conversions ----------------------------------------------------------------------------------------------------

inline float bits_to_float(uint32_t u) { return __builtin_bit_cast(float, u); }
inline uint32_t float_to_bits(float f) { return __builtin_bit_cast(uint32_t, f); }

inline Vec bf16_to_vec(const uint16_t* p) {
  const VecShort raw = *reinterpret_cast<const VecShortMemory*>(p);
  return (Vec)(__builtin_convertvector(raw, VecUint) << 16);
}

inline void vec_to_bf16(uint16_t* p, Vec v) {
  const VecUint u = (VecUint)v;
  const VecUint rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const VecUint quiet = (u >> 16) | 0x40u;
  const VecUint result = v == v ? rounded : quiet;
  *reinterpret_cast<VecShortMemory*>(p) = __builtin_convertvector(result, VecShort);
}

inline float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

inline uint16_t float_to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  return uint16_t(f == f ? (u + 0x7fffu + ((u >> 16) & 1u)) >> 16 : (u >> 16) | 0x40u);
}

inline float f16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t rest = h & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ff) << 13));
  // The exponent moves from bias 15 to 127 by a product with 2^112, which also makes subnormals right.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}

inline uint16_t float_to_f16(float f) {
  const uint32_t u = float_to_bits(f);
  const uint16_t sign = uint16_t((u >> 16) & 0x8000);
  const uint32_t rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00 | ((rest >> 13) & 0x3ff));
  if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // 65520 and above round to infinity
  if (rest < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the value, rounded to a multiple of 2^-24, in the low bits.
    const float shifted = bits_to_float(rest) + 0.5f;
    return uint16_t(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  return uint16_t(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

inline Vec f16_to_vec(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec v{};
  for (int i = 0; i < kLanes; ++i) v[i] = f16_to_float(p[i]);
  return v;
#endif
}

inline void vec_to_f16(uint16_t* p, Vec v) {
#if defined(__AVX512F__)
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, (__m512)v, nearest));
#elif defined(__AVX2__) && defined(__F16C__)
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, nearest));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_f16(v[i]);
#endif
}

inline const char* address(const AttentionTensor& t, AttentionDType dtype, int64_t row, int64_t head) {
  const int64_t bytes = dtype == AttentionDType::f32 ? 4 : 2;
  return static_cast<const char*>(t.data) + (row * t.row_stride + head * t.head_stride) * bytes;
}

// Reads dim values of one row as float and fills up to padded_dim with 0.
inline void read_row(const char* from, AttentionDType dtype, int64_t dim, int64_t padded_dim, float* to) {
  int64_t c = 0;
  if (dtype == AttentionDType::f32) {
    const float* x = reinterpret_cast<const float*>(from);
    for (; c + kLanes <= dim; c += kLanes) store(to + c, load(x + c));
    for (; c < dim; ++c) to[c] = x[c];
  } else if (dtype == AttentionDType::bf16) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
    for (; c + kLanes <= dim; c += kLanes) store(to + c, bf16_to_vec(x + c));
    for (; c < dim; ++c) to[c] = bf16_to_float(x[c]);
  } else {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
    for (; c + kLanes <= dim; c += kLanes) store(to + c, f16_to_vec(x + c));
    for (; c < dim; ++c) to[c] = f16_to_float(x[c]);
  }
  for (; c < padded_dim; ++c) to[c] = 0;
}

// Writes dim values times factor.
inline void write_row(char* to, AttentionDType dtype, int64_t dim, const float* from, float factor) {
  const Vec f = splat(factor);
  int64_t c = 0;
  if (dtype == AttentionDType::f32) {
    float* y = reinterpret_cast<float*>(to);
    for (; c + kLanes <= dim; c += kLanes) store(y + c, load(from + c) * f);
    for (; c < dim; ++c) y[c] = from[c] * factor;
  } else if (dtype == AttentionDType::bf16) {
    uint16_t* y = reinterpret_cast<uint16_t*>(to);
    for (; c + kLanes <= dim; c += kLanes) vec_to_bf16(y + c, load(from + c) * f);
    for (; c < dim; ++c) y[c] = float_to_bf16(from[c] * factor);
  } else {
    uint16_t* y = reinterpret_cast<uint16_t*>(to);
    for (; c + kLanes <= dim; c += kLanes) vec_to_f16(y + c, load(from + c) * f);
    for (; c < dim; ++c) y[c] = float_to_f16(from[c] * factor);
  }
}

// Rows first .. first + count - 1 of one head as float[count, padded_dim].
inline void read_rows(const AttentionTensor& t, AttentionDType dtype, int64_t first, int64_t count, int64_t head, int64_t dim,
                      int64_t padded_dim, float* to) {
  for (int64_t r = 0; r < count; ++r) read_row(address(t, dtype, first + r, head), dtype, dim, padded_dim, to + r * padded_dim);
}

inline void write_rows(const AttentionTensor& t, AttentionDType dtype, int64_t first, int64_t count, int64_t head, int64_t dim,
                       int64_t padded_dim, const float* from, float factor) {
  for (int64_t r = 0; r < count; ++r) {
    write_row(const_cast<char*>(address(t, dtype, first + r, head)), dtype, dim, from + r * padded_dim, factor);
  }
}

inline void fill(float* to, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// ---- which keys a query sees ----------------------------------------------------------------------------------------

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline int64_t first_key(const AttentionSegment& s, int64_t row) { return larger(0, row + s.shift - s.left); }
inline int64_t last_key(const AttentionSegment& s, int64_t row) { return smaller(s.k_len - 1, row + s.shift + s.right); }

// Keys that rows row .. row + count - 1 see together: begin <= key < end, empty when begin >= end.
struct KeyRange {
  int64_t begin, end;
};
inline KeyRange keys_of(const AttentionSegment& s, int64_t row, int64_t count) {
  return {first_key(s, row), last_key(s, row + count - 1) + 1};
}

// Whether every one of the rows sees every key of the range.
inline bool sees_all(const AttentionSegment& s, int64_t row, int64_t count, KeyRange keys) {
  return first_key(s, row + count - 1) <= keys.begin && last_key(s, row) >= keys.end - 1;
}

// For the queries row + lane .. row + lane + kLanes - 1: first and last visible key, counted from keys.begin. Lanes past the
// rows see none.
struct LaneKeys {
  VecInt first = {}, last = {};
  VecInt at(int64_t key) const { return (splat_int(int32_t(key)) >= first) & (splat_int(int32_t(key)) <= last); }
};

inline LaneKeys lane_keys(const AttentionSegment& s, int64_t row, int64_t rows, int64_t lane, KeyRange keys) {
  LaneKeys result;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t query = row + lane + i;
    result.first[i] = int32_t(larger(first_key(s, query) - keys.begin, 0));
    result.last[i] = lane + i < rows ? int32_t(larger(last_key(s, query) - keys.begin, -1)) : -1;
  }
  return result;
}

}  // namespace
}  // namespace TE_SIMD
}  // namespace te
