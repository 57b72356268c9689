// fp8_encode of convert.h for a vector of lanes, and the loads and stores around it, per instruction-set level.
//
// For *.simd.cpp only (everything is in an unnamed namespace of te::TE_SIMD). A step is kStep values: kVectors vectors of kWidth
// lanes in, kStep bytes out. Written by hand because compilers turn the masks of the scalar form into long detours.
#pragma once

#include <cstdint>
#include <cstring>

#include "convert.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace te {
namespace TE_SIMD {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kVectors = 1;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kVectors = 4;
#else
constexpr int kWidth = 4, kVectors = 4;
#endif
constexpr int kStep = kWidth * kVectors;

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef uint8_t Codes __attribute__((vector_size(kWidth)));

TE_INLINE Floats load_floats(const float* p) {
  Floats v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// 16-bit values in the low halves of words.
TE_INLINE Words load_halves(const void* p) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#endif
  Halves h;
  memcpy(&h, p, sizeof(h));
#if defined(__x86_64__) && !defined(__AVX2__)
  // SSE2 widens by interleaving with zeros.
  uint64_t low;
  memcpy(&low, &h, 8);
  return (Words)_mm_unpacklo_epi16(_mm_cvtsi64_si128(int64_t(low)), _mm_setzero_si128());
#else
  return __builtin_convertvector(h, Words);
#endif
}

TE_INLINE void load_step(const float* x, Floats* v) {
  for (int k = 0; k < kVectors; ++k) v[k] = load_floats(x + k * kWidth);
}
TE_INLINE void load_step(const bf16* x, Floats* v) {
  for (int k = 0; k < kVectors; ++k) v[k] = (Floats)(load_halves(x + k * kWidth) << 16);
}
TE_INLINE void load_step(const f16* x, Floats* v) {
  for (int k = 0; k < kVectors; ++k) {
    const Words h = load_halves(x + k * kWidth);
    const Words magnitude = h & 0x7FFFu;
    const Words finite = (Words)((Floats)(magnitude << 13) * bits_float((127u + 112u) << 23));
    const Words special = (magnitude << 13) | kInfBits;
    v[k] = (Floats)(((Ints)magnitude >= 0x7C00 ? special : finite) | ((h & 0x8000u) << 16));
  }
}

// Codes (0 to 255) of a step -> bytes.
TE_INLINE void store_step(const Words* code, uint8_t* out) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)code[0]));
#elif defined(__AVX2__)
  const __m256i low = _mm256_packus_epi32((__m256i)code[0], (__m256i)code[1]);
  const __m256i high = _mm256_packus_epi32((__m256i)code[2], (__m256i)code[3]);
  const __m256i mixed = _mm256_packus_epi16(low, high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32(mixed, order));
#elif defined(__x86_64__)
  const __m128i low = _mm_packs_epi32((__m128i)code[0], (__m128i)code[1]);
  const __m128i high = _mm_packs_epi32((__m128i)code[2], (__m128i)code[3]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(low, high));
#else
  for (int k = 0; k < kVectors; ++k) {
    const Codes b = __builtin_convertvector(code[k], Codes);
    memcpy(out + k * kWidth, &b, sizeof(b));
  }
#endif
}

// Clean: neither NaN nor beyond the largest value.
template <int Code, bool Clean>
TE_INLINE Words encode_vector(Floats x) {
  using F = Fp8<Code>;
  constexpr int shift = 23 - F::mantissa;
  constexpr int32_t smallest_normal = int32_t(128 - F::bias) << 23;
  constexpr uint32_t spacing = uint32_t(127 + 24 - F::bias - F::mantissa) << 23;
  constexpr uint32_t rounding = ((1u << (shift - 1)) - 1u) - (uint32_t(127 - F::bias) << 23);
  const Words u = (Words)x;
  const Words a = u & 0x7FFFFFFFu;
  const Words subnormal = (Words)((Floats)a + bits_float(spacing)) - spacing;
  const Words normal = (a + ((a >> shift) & 1u) + rounding) >> shift;
  Words code = (Ints)a < smallest_normal ? subnormal : normal;
  if (!Clean) code = (Ints)code > int32_t(F::max_code) ? Words{} + F::max_code : code;
  Words sign = (u >> 24) & 0x80u;
  if (F::fnuz) sign = (Ints)code == 0 ? Words{} : sign;
  code |= sign;
  if (!Clean) code = (Ints)a > int32_t(kInfBits) ? Words{} + F::nan_code : code;
  return code;
}

}  // namespace
}  // namespace TE_SIMD
}  // namespace te
