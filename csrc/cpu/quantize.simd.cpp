// Inner loops of quantise and dequantise (quantize_kernels.h). The bits are the same at every level because each lane is one FP32
// multiplication followed by integer arithmetic (convert.h; encode_vector.h is the same written for vectors).
#include <cstdint>
#include <cstring>

#include "convert.h"
#include "encode_vector.h"
#include "quantize_kernels.h"
#include "scaling.h"

namespace te {
namespace TE_SIMD {
namespace {

// Asks for the first bytes of a row that comes soon: where rows are cut into pieces, the processor cannot foresee where the next one
// begins. The address may lie past the end of the tensor; asking for it does nothing then.
TE_INLINE void expect_read(const void* p, int64_t offset, int64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(p) + uintptr_t(offset);
  for (int64_t b = 0; b < (bytes < 2048 ? bytes : 2048); b += 64) __builtin_prefetch(reinterpret_cast<const void*>(begin + b), 0, 3);
}
TE_INLINE void expect_write(const void* p, int64_t offset, int64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(p) + uintptr_t(offset);
  for (int64_t b = 0; b < (bytes < 2048 ? bytes : 2048); b += 64) __builtin_prefetch(reinterpret_cast<const void*>(begin + b), 1, 3);
}

#define TE_MEMBER inline __attribute__((always_inline))

// Asks for what lies `ahead` bytes after a step of values: spread over the work on a row, as many lines are under way as the processor
// can follow.
template <typename T>
TE_INLINE void expect_step(const T* x, int64_t ahead) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x) + uintptr_t(ahead);
  for (int64_t b = 0; b < int64_t(kStep * sizeof(T)); b += 64) __builtin_prefetch(reinterpret_cast<const void*>(begin + uintptr_t(b)), 0, 3);
}

template <typename T>
struct Lane;  // the integer whose maximum is the amax, and its way back to float bits
template <>
struct Lane<float> {
  using Int = int32_t;
  static constexpr Int mask = 0x7FFFFFFF;
  static TE_MEMBER uint32_t bits(Int v) { return uint32_t(v); }
};
template <>
struct Lane<bf16> {
  using Int = int16_t;
  static constexpr Int mask = 0x7FFF;
  static TE_MEMBER uint32_t bits(Int v) { return uint32_t(uint16_t(v)) << 16; }
};
template <>
struct Lane<f16> {
  using Int = int16_t;
  static constexpr Int mask = 0x7FFF;
  static TE_MEMBER uint32_t bits(Int v) { return float_bits(to_float(f16{uint16_t(v)})); }
};

template <typename T>
TE_INLINE typename Lane<T>::Int load_bits(const T* x) {
  typename Lane<T>::Int v;
  memcpy(&v, x, sizeof(v));
  return v;
}

// The largest of the lanes, none of which is negative.
template <typename V>
TE_INLINE int32_t largest_lane(V v) {
#if defined(__SSE4_1__)
  if (sizeof(v[0]) == 2) {  // one instruction finds the smallest of eight
    __m128i part[sizeof(V) / 16];
    memcpy(part, &v, sizeof(v));
    for (int n = sizeof(V) / 32; n > 0; n /= 2) {
      for (int i = 0; i < n; ++i) part[i] = _mm_max_epi16(part[i], part[i + n]);
    }
    return ~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(part[0], _mm_set1_epi16(-1)))) & 0xFFFF;
  }
#endif
  int32_t best = 0;
  for (int i = 0; i < int(sizeof(V) / sizeof(v[0])); ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// Vectors of the integers of Lane<T>.
template <typename T>
struct Lanes {
  typedef typename Lane<T>::Int V __attribute__((vector_size(kWidth * 4)));
  static constexpr int width = int(kWidth * 4 / sizeof(T));
  static TE_MEMBER V load(const T* x) { return load_vector<V>(x) & Lane<T>::mask; }
  static TE_MEMBER V larger(V a, V b) { return a > b ? a : b; }
};

template <typename T>
TE_INLINE typename Lane<T>::Int amax_span(const T* x, int64_t n) {
  using Int = typename Lane<T>::Int;
  using L = Lanes<T>;
  typename L::V wide = {};
  int64_t i = 0;
  for (; i + L::width <= n; i += L::width) wide = L::larger(L::load(x + i), wide);
  Int best = Int(largest_lane(wide));
  for (; i < n; ++i) {
    const Int v = Int(load_bits(x + i) & Lane<T>::mask);
    best = v > best ? v : best;
  }
  return best;
}

template <typename T>
void amax_rows_t(const T* x, int64_t ld, int64_t rows, int64_t cols, int64_t group, uint32_t* out) {
  const int64_t groups = (cols + group - 1) / group;
  for (int64_t r = 0; r < rows; ++r) {
    expect_read(x, (r + 2) * ld * int64_t(sizeof(T)), cols * int64_t(sizeof(T)));
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group;
      const int64_t n = cols - begin < group ? cols - begin : group;
      // A constant trip count lets short groups live in registers.
      const T* p = x + r * ld + begin;
      out[r * groups + g] = Lane<T>::bits(n == 128 ? amax_span(p, 128) : n == 32 ? amax_span(p, 32) : amax_span(p, n));
    }
  }
}

// largest_lane of four vectors.
template <typename V>
TE_INLINE void largest_lanes(const V* v, int32_t* out) {
#if defined(__AVX512F__)
  if (sizeof(v[0][0]) == 2) {
    // Lanes of two vectors, then of four, alternate; all lanes of all four are halved at each step.
    const __m512i a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
    const __m512i ab = _mm512_max_epi16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
    const __m512i cd = _mm512_max_epi16(_mm512_unpacklo_epi16(c, d), _mm512_unpackhi_epi16(c, d));
    const __m512i all = _mm512_max_epi16(_mm512_unpacklo_epi32(ab, cd), _mm512_unpackhi_epi32(ab, cd));
    const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i quarter = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i best = _mm_max_epi16(quarter, _mm_srli_si128(quarter, 8));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_cvtepu16_epi32(best));
    return;
  }
#endif
  for (int i = 0; i < 4; ++i) out[i] = largest_lane(v[i]);
}

// Rows of a matrix at once: the maxima of the columns are loaded and stored once for all of them.
template <int Rows, typename T>
TE_INLINE void amax_both_rows(const T* x, int64_t ld, int64_t cols, int64_t group, uint32_t* out, int64_t groups,
                              typename Lane<T>::Int* col_best) {
  using Int = typename Lane<T>::Int;
  using L = Lanes<T>;
  constexpr int64_t piece = 128;
  const int64_t part = group == kMxBlock ? kMxBlock : piece;  // columns whose maximum is taken together
  for (int r = 0; r < Rows; ++r) expect_read(x, (r + 4) * ld * int64_t(sizeof(T)), cols * int64_t(sizeof(T)));
  for (int64_t c0 = 0, g = 0; c0 < cols; c0 += part, g += groups > 1) {
    const int64_t n = cols - c0 < part ? cols - c0 : part;
    typename L::V row_best[4] = {};
    int64_t c = c0;
    for (; c + L::width <= c0 + n; c += L::width) {
      typename L::V best = load_vector<typename L::V>(col_best + c);
      for (int r = 0; r < Rows; ++r) {
        const typename L::V v = L::load(x + r * ld + c);
        best = L::larger(v, best);
        row_best[r] = L::larger(v, row_best[r]);
      }
      memcpy(col_best + c, &best, sizeof(best));
    }
    int32_t largest[4];
    if (Rows == 4) largest_lanes(row_best, largest);
    else largest[0] = largest_lane(row_best[0]);
    for (int r = 0; r < Rows; ++r) {
      Int most = Int(largest[r]);
      for (int64_t i = c; i < c0 + n; ++i) {
        const Int v = Int(load_bits(x + r * ld + i) & Lane<T>::mask);
        most = v > most ? v : most;
        col_best[i] = v > col_best[i] ? v : col_best[i];
      }
      uint32_t* to = out + r * groups + g;
      const uint32_t bits = Lane<T>::bits(most);
      *to = c0 == 0 || groups > 1 || bits > *to ? bits : *to;
    }
  }
}

template <typename T>
void amax_both_t(const T* x, int64_t ld, int64_t rows, int64_t cols, int64_t group, uint32_t* out, uint32_t* out_cols) {
  const int64_t groups = (cols + group - 1) / group;
  typename Lane<T>::Int col_best[kMostCols] = {};
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) amax_both_rows<4>(x + r * ld, ld, cols, group, out + r * groups, groups, col_best);
  for (; r < rows; ++r) amax_both_rows<1>(x + r * ld, ld, cols, group, out + r * groups, groups, col_best);
  for (int64_t c = 0; c < cols; ++c) out_cols[c] = Lane<T>::bits(col_best[c]);
}

template <typename T>
int64_t count_nonfinite_t(const T* x, int64_t ld, int64_t rows, int64_t cols) {
  int64_t count = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) count += (float_bits(to_float(x[r * ld + c])) & kInfBits) == kInfBits;
  }
  return count;
}

// ---- encoding --------------------------------------------------------------------------------------------------------------

// kStep values with the scales of their two halves. kept: a second place for the codes, or null. stream: `out` past the caches.
template <int Code, bool Clean, typename T>
TE_INLINE void encode_step(const T* x, int64_t ahead, Floats first, Floats second, uint8_t* out, uint8_t* kept, bool stream) {
  expect_step(x, ahead);
  const Words a = encode_pair<Code, Clean>(load_pair(x), first, first);
  const Words b = encode_pair<Code, Clean>(load_pair(x + kPair), second, second);
  const Codes codes = pack(a, b, sizeof(T) == 4);
  store_codes(codes, out, stream);
  if (kept != nullptr) memcpy(kept, &codes, sizeof(codes));
}

// n values with one scale.
template <int Code, bool Clean, typename T>
TE_INLINE void encode_span(const T* x, int64_t ahead, int64_t n, float scale, uint8_t* out, uint8_t* kept, bool stream) {
  int64_t i = 0;
  const Floats s = Floats{} + scale;
  for (; i + kStep <= n; i += kStep) {
    encode_step<Code, Clean>(x + i, ahead, s, s, out + i, kept == nullptr ? nullptr : kept + i, stream);
  }
  for (; i < n; ++i) {
    out[i] = uint8_t(fp8_encode<Code>(to_float(x[i]) * scale));
    if (kept != nullptr) kept[i] = out[i];
  }
}

template <int Code, bool Clean, typename T>
void encode_rows_t(const T* x, int64_t ld, int64_t rows, int64_t cols, const float* scales, int64_t scale_ld, int64_t group,
                   int64_t ahead, uint8_t* out, int64_t out_ld, uint8_t* kept, int64_t kept_ld, bool stream) {
  const int64_t bytes = ahead * ld * int64_t(sizeof(T));
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * ld;
    const float* s = scales + r * scale_ld;
    uint8_t *to = out + r * out_ld, *keep = kept == nullptr ? nullptr : kept + r * kept_ld;
    int64_t begin = 0;
    if (2 * group == kStep) {  // two groups a step
      for (; begin + kStep <= cols; begin += kStep, s += 2) {
        encode_step<Code, Clean>(from + begin, bytes, Floats{} + s[0], Floats{} + s[1], to + begin, keep == nullptr ? nullptr : keep + begin,
                                 stream);
      }
    }
    for (; begin < cols; begin += group, ++s) {
      const int64_t n = cols - begin < group ? cols - begin : group;
      encode_span<Code, Clean>(from + begin, bytes, n, *s, to + begin, keep == nullptr ? nullptr : keep + begin, stream);
    }
  }
}

template <int Code, bool Clean, typename T>
void encode_both_t(const T* x, int64_t ld, int64_t rows, int64_t cols, const float* scales, int64_t scale_ld, int64_t group,
                   const float* col_scales, int64_t ahead, uint8_t* out, int64_t out_ld, uint8_t* out_cols, int64_t out_cols_ld,
                   bool stream) {
  Floats even[kMostCols / kPair], odd[kMostCols / kPair];
  for (int64_t p = 0; p < cols / kPair; ++p) order_scales(col_scales + p * kPair, x, even + p, odd + p);
  const int places = group == kMxBlock ? 5 : group == kBlock ? 7 : 62;  // c >> places = c / group
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * ld;
    const float* s = scales + r * scale_ld;
    uint8_t *to = out + r * out_ld, *to_cols = out_cols + r * out_cols_ld;
    int64_t i = 0;
    for (int64_t p = 0; i + kStep <= cols; i += kStep, p += 2) {
      expect_step(from + i, ahead * ld * int64_t(sizeof(T)));
      const Pair a = load_pair(from + i), b = load_pair(from + i + kPair);
      const Floats s_a = Floats{} + s[i >> places], s_b = Floats{} + s[(i + kPair) >> places];
      store_codes(pack(encode_pair<Code, Clean>(a, s_a, s_a), encode_pair<Code, Clean>(b, s_b, s_b), sizeof(T) == 4), to + i, stream);
      store_codes(pack(encode_pair<Code, Clean>(a, even[p], odd[p]), encode_pair<Code, Clean>(b, even[p + 1], odd[p + 1]),
                       sizeof(T) == 4), to_cols + i, false);
    }
    for (; i < cols; ++i) {
      const float v = to_float(from[i]);
      to[i] = uint8_t(fp8_encode<Code>(v * s[i >> places]));
      to_cols[i] = uint8_t(fp8_encode<Code>(v * col_scales[i]));
    }
  }
}

// ---- byte transpose --------------------------------------------------------------------------------------------------------

// kLanes lanes of 16 bytes: 16 rows of kTurnCols bytes are turned at once, each lane for itself.
#if defined(__AVX512F__)
typedef __m512i Bytes;
constexpr int kLanes = 4;
TE_INLINE Bytes interleave_low(Bytes a, Bytes b) { return _mm512_unpacklo_epi8(a, b); }
TE_INLINE Bytes interleave_high(Bytes a, Bytes b) { return _mm512_unpackhi_epi8(a, b); }
TE_INLINE void store_lanes(Bytes v, uint8_t* out, int64_t lane_step) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + lane_step), _mm512_extracti32x4_epi32(v, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * lane_step), _mm512_extracti32x4_epi32(v, 2));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * lane_step), _mm512_extracti32x4_epi32(v, 3));
}
#elif defined(__AVX2__)
typedef __m256i Bytes;
constexpr int kLanes = 2;
TE_INLINE Bytes interleave_low(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
TE_INLINE Bytes interleave_high(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
TE_INLINE void store_lanes(Bytes v, uint8_t* out, int64_t lane_step) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + lane_step), _mm256_extracti128_si256(v, 1));
}
#elif defined(__x86_64__)
typedef __m128i Bytes;
constexpr int kLanes = 1;
TE_INLINE Bytes interleave_low(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
TE_INLINE Bytes interleave_high(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }
TE_INLINE void store_lanes(Bytes v, uint8_t* out, int64_t) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), v); }
#else
typedef uint8_t Bytes __attribute__((vector_size(16)));
constexpr int kLanes = 1;
#if defined(__clang__)
#define TE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Bytes{__VA_ARGS__})
#endif
TE_INLINE Bytes interleave_low(Bytes a, Bytes b) {
  return TE_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
TE_INLINE Bytes interleave_high(Bytes a, Bytes b) {
  return TE_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
TE_INLINE void store_lanes(Bytes v, uint8_t* out, int64_t) { memcpy(out, &v, 16); }
#endif
constexpr int kTurnCols = 16 * kLanes;

// 16 rows of kTurnCols bytes; four perfect shuffles of 16 rows of 16 bytes are a transpose.
TE_INLINE void transpose_16_rows(const uint8_t* in, int64_t in_ld, uint8_t* out, int64_t out_ld) {
  Bytes a[16], b[16];
  for (int i = 0; i < 16; ++i) memcpy(&a[i], in + i * in_ld, sizeof(Bytes));
  for (int i = 0; i < 8; ++i) b[2 * i] = interleave_low(a[i], a[i + 8]), b[2 * i + 1] = interleave_high(a[i], a[i + 8]);
  for (int i = 0; i < 8; ++i) a[2 * i] = interleave_low(b[i], b[i + 8]), a[2 * i + 1] = interleave_high(b[i], b[i + 8]);
  for (int i = 0; i < 8; ++i) b[2 * i] = interleave_low(a[i], a[i + 8]), b[2 * i + 1] = interleave_high(a[i], a[i + 8]);
  for (int i = 0; i < 8; ++i) a[2 * i] = interleave_low(b[i], b[i + 8]), a[2 * i + 1] = interleave_high(b[i], b[i + 8]);
  for (int i = 0; i < 16; ++i, out += out_ld) store_lanes(a[i], out, 16 * out_ld);
}

#if defined(__x86_64__)
// One cache line, past the caches; `out` is aligned to 64 bytes.
TE_INLINE void stream_line(const uint8_t* in, uint8_t* out) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_loadu_si512(in));
#elif defined(__AVX2__)
  for (int i = 0; i < 64; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
  }
#else
  for (int i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
  }
#endif
}
#endif

// ---- choice of the template by dtype and format -----------------------------------------------------------------------------

template <typename T>
TE_INLINE const T* rows_of(Matrix m) {
  return static_cast<const T*>(m.x);
}

// Whether every vector of codes is aligned. Groups of columns are a multiple of a vector, or a row is one.
TE_INLINE bool can_stream(int64_t cols, int64_t rows, const uint8_t* out, int64_t out_ld) {
  return cols % 64 == 0 && (rows == 1 || out_ld % 64 == 0) && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

#define TE_BY_DTYPE(m, call)                     \
  switch ((m).dtype) {                           \
    case kF32: { using T = float; call; break; } \
    case kBf16: { using T = bf16; call; break; } \
    default: { using T = f16; call; break; }     \
  }

#define TE_BY_FORMAT(format, call)                                    \
  switch (format) {                                                   \
    case kE4M3: { constexpr int Code = kE4M3; call; break; }          \
    case kE5M2: { constexpr int Code = kE5M2; call; break; }          \
    case kE4M3Fnuz: { constexpr int Code = kE4M3Fnuz; call; break; }  \
    default: { constexpr int Code = kE5M2Fnuz; call; break; }         \
  }

template <int Code, typename Y>
void decode_row_t(const uint8_t* __restrict__ in, int64_t cols, const float* scales, int64_t group, Y* __restrict__ y) {
  for (int64_t begin = 0, g = 0; begin < cols; begin += group, ++g) {
    const int64_t end = cols - begin < group ? cols : begin + group;
    const float scale = scales[g];
    for (int64_t c = begin; c < end; ++c) from_float(fp8_decode<Code>(in[c]) * scale, y + c);
  }
}

}  // namespace

void amax_rows(Matrix m, int64_t rows, int64_t cols, int64_t group, uint32_t* out) {
  TE_BY_DTYPE(m, amax_rows_t(rows_of<T>(m), m.ld, rows, cols, group, out))
}

void amax_both(Matrix m, int64_t rows, int64_t cols, int64_t group, uint32_t* out, uint32_t* out_cols) {
  TE_BY_DTYPE(m, amax_both_t(rows_of<T>(m), m.ld, rows, cols, group, out, out_cols))
}

uint32_t scales_from_amax(const uint32_t* __restrict__ amax, int64_t n, float max, bool pow2, float* __restrict__ scale,
                          float* __restrict__ scale_inv) {
  if (pow2) {
    for (int64_t i = 0; i < n; ++i) {
      const Scale s = scale_from_amax(amax[i], max, true);
      scale[i] = s.scale;
      scale_inv[i] = s.scale_inv;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const Scale s = scale_from_amax(amax[i], max, false);
      scale[i] = s.scale;
      scale_inv[i] = s.scale_inv;
    }
  }
  int32_t best = 0;  // the sign bit of an amax is clear
  for (int64_t i = 0; i < n; ++i) best = int32_t(amax[i]) > best ? int32_t(amax[i]) : best;
  return uint32_t(best);
}

int64_t count_nonfinite(Matrix m, int64_t rows, int64_t cols) {
  int64_t count = 0;
  TE_BY_DTYPE(m, count = count_nonfinite_t(rows_of<T>(m), m.ld, rows, cols))
  return count;
}

void encode_rows(Matrix m, int64_t rows, int64_t cols, const float* scales, int64_t scale_ld, int64_t group, int64_t format,
                 bool clean, int64_t ahead, uint8_t* out, int64_t out_ld, uint8_t* kept, int64_t kept_ld, bool stream) {
  stream = stream && group % 32 == 0 && can_stream(cols, rows, out, out_ld);
  if (clean) {
    TE_BY_FORMAT(format, TE_BY_DTYPE(m, (encode_rows_t<Code, true>(rows_of<T>(m), m.ld, rows, cols, scales, scale_ld, group, ahead, out, out_ld, kept, kept_ld, stream))))
  } else {
    TE_BY_FORMAT(format, TE_BY_DTYPE(m, (encode_rows_t<Code, false>(rows_of<T>(m), m.ld, rows, cols, scales, scale_ld, group, ahead, out, out_ld, kept, kept_ld, stream))))
  }
}

void encode_both(Matrix m, int64_t rows, int64_t cols, const float* scales, int64_t scale_ld, int64_t group, const float* col_scales,
                 int64_t format, bool clean, int64_t ahead, uint8_t* out, int64_t out_ld, uint8_t* out_cols, int64_t out_cols_ld,
                 bool stream) {
  stream = stream && can_stream(cols, rows, out, out_ld);
  if (clean) {
    TE_BY_FORMAT(format, TE_BY_DTYPE(m, (encode_both_t<Code, true>(rows_of<T>(m), m.ld, rows, cols, scales, scale_ld, group, col_scales, ahead, out, out_ld, out_cols, out_cols_ld, stream))))
  } else {
    TE_BY_FORMAT(format, TE_BY_DTYPE(m, (encode_both_t<Code, false>(rows_of<T>(m), m.ld, rows, cols, scales, scale_ld, group, col_scales, ahead, out, out_ld, out_cols, out_cols_ld, stream))))
  }
}

void transpose_bytes(const uint8_t* in, int64_t in_ld, int64_t rows, int64_t cols, uint8_t* out, int64_t out_ld) {
  const int64_t whole_rows = rows / 16 * 16;
  const int64_t whole_cols = cols / kTurnCols * kTurnCols;
  for (int64_t r = 0; r < whole_rows; r += 16) {
    for (int64_t c = 0; c < whole_cols; c += kTurnCols) transpose_16_rows(in + r * in_ld + c, in_ld, out + c * out_ld + r, out_ld);
  }
  if (whole_rows == rows && whole_cols == cols) return;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < whole_rows ? whole_cols : 0; c < cols; ++c) out[c * out_ld + r] = in[r * in_ld + c];
  }
}

void copy_rows(const uint8_t* in, int64_t in_ld, int64_t rows, int64_t n, uint8_t* out, int64_t out_ld, bool stream) {
#if defined(__x86_64__)
  if (stream && n % 64 == 0 && (rows == 1 || out_ld % 64 == 0) && reinterpret_cast<uintptr_t>(out) % 64 == 0) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < n; c += 64) stream_line(in + r * in_ld + c, out + r * out_ld + c);
    }
    return;
  }
#else
  (void)stream;
#endif
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* from = in + r * in_ld;
    uint8_t* to = out + r * out_ld;
    expect_write(to, 2 * out_ld, n);
    int64_t c = 0;
    for (; c + 64 <= n; c += 64) memcpy(to + c, from + c, 64);  // of constant size: no call
    if (c < n) memcpy(to + c, from + c, n - c);
  }
}

void decode_row(const uint8_t* in, int64_t cols, const float* scales, int64_t group, int64_t format, void* y, int y_dtype) {
  if (y_dtype == kF32) {
    TE_BY_FORMAT(format, (decode_row_t<Code>(in, cols, scales, group, static_cast<float*>(y))))
  } else {
    TE_BY_FORMAT(format, (decode_row_t<Code>(in, cols, scales, group, static_cast<bf16*>(y))))
  }
}

}  // namespace TE_SIMD
}  // namespace te
