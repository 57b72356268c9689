// fp8_encode of convert.h for vectors of values, with the loads and stores around it, per instruction-set level.
//
// For *.simd.cpp only (everything is in an unnamed namespace of te::TE_SIMD). Values are taken in pairs: neighbours x[2i], x[2i + 1]
// are the halves of word i for 16-bit inputs, so `even` and `odd` each cost one mask or shift, and the two codes of a word are
// finished together in its halves. A step is two vectors of such words, whose codes fill one vector of bytes.
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
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kPair = 2 * kWidth;
constexpr int kStep = 2 * kPair;

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 4)));
typedef uint8_t Codes __attribute__((vector_size(kStep)));

// kPair values: their magnitudes, and words with the sign of the even one in bit 15 and of the odd one in bit 31. Which value of
// the kPair is where is the business of load_pair and pack.
struct Pair {
  Floats even, odd;
  Words signs;
};

template <typename V>
TE_INLINE V load_vector(const void* p) {
  V v;
  memcpy(&v, p, sizeof(v));
  return v;
}

TE_INLINE Pair load_pair(const bf16* x) {
  const Words w = load_vector<Words>(x);
  const Words magnitude = w & 0x7FFF7FFFu;
  return {(Floats)(magnitude << 16), (Floats)(magnitude & 0xFFFF0000u), w};
}

TE_INLINE Floats widen_halves(Words magnitude) {
  const Words finite = (Words)((Floats)(magnitude << 13) * bits_float((127u + 112u) << 23));
  const Words special = (magnitude << 13) | kInfBits;
  return (Floats)((Ints)magnitude >= 0x7C00 ? special : finite);
}
TE_INLINE Pair load_pair(const f16* x) {
  const Words w = load_vector<Words>(x);
  return {widen_halves(w & 0x7FFFu), widen_halves((w >> 16) & 0x7FFFu), w};
}

// The values at even and at odd places, in groups of four lanes: two of a, two of b.
TE_INLINE void split(Floats a, Floats b, Floats* even, Floats* odd) {
#if defined(__AVX512F__)
  *even = (Floats)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88), *odd = (Floats)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xDD);
#elif defined(__AVX2__)
  *even = (Floats)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88), *odd = (Floats)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xDD);
#elif defined(__x86_64__)
  *even = (Floats)_mm_shuffle_ps((__m128)a, (__m128)b, 0x88), *odd = (Floats)_mm_shuffle_ps((__m128)a, (__m128)b, 0xDD);
#else
  *even = Floats{a[0], a[2], b[0], b[2]}, *odd = Floats{a[1], a[3], b[1], b[3]};
#endif
}
TE_INLINE Pair load_pair(const float* x) {
  Floats even, odd;
  split(load_vector<Floats>(x), load_vector<Floats>(x + kWidth), &even, &odd);
  const Words signs = ((Words)even >> 16) | ((Words)odd & 0xFFFF0000u);
  return {(Floats)((Words)even & 0x7FFFFFFFu), (Floats)((Words)odd & 0x7FFFFFFFu), signs};
}

// Scales for kPair values, in the places where load_pair puts those values.
TE_INLINE void order_scales(const float* s, const float*, Floats* even, Floats* odd) {
  split(load_vector<Floats>(s), load_vector<Floats>(s + kWidth), even, odd);
}
template <typename T>
TE_INLINE void order_scales(const float* s, const T*, Floats* even, Floats* odd) {
  for (int i = 0; i < kWidth; ++i) (*even)[i] = s[2 * i], (*odd)[i] = s[2 * i + 1];
}

TE_INLINE Floats multiply_add(Floats a, float b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)c);
#else
  return a * b + c;  // a and b are powers of two here: their product is exact, so this rounds once as well
#endif
}

// Two codes in the halves of each word. Clean: no product is NaN or beyond the largest value.
//
// To round a magnitude m to F::mantissa bits, add the power of two whose spacing is that of the wanted result: 2^(e + K) with
// K = 23 - mantissa and e the exponent of m, or that of the smallest normal number where m is below it. The hardware's addition then
// rounds to nearest even, and the low bits of the sum are m in units of that spacing: 2^mantissa up to twice that, or less below the
// smallest normal number. code = units + 2^mantissa * (e - smallest e) in both cases.
template <int Code, bool Clean>
TE_INLINE Words encode_pair(const Pair& x, Floats scale_even, Floats scale_odd) {
  using F = Fp8<Code>;
  constexpr int shift = 23 - F::mantissa;
  constexpr uint32_t smallest = uint32_t(128 - F::bias) << 23;
  const float lift = bits_float(uint32_t(127 + shift) << 23);
  constexpr uint32_t base = smallest >> shift;
  Floats even = x.even * scale_even, odd = x.odd * scale_odd;
  Words nan = {};
  if (!Clean) {
    nan = ((Words)((Ints)(Words)even > int32_t(kInfBits)) & 0xFFFFu) | ((Words)((Ints)(Words)odd > int32_t(kInfBits)) & 0xFFFF0000u);
    const Floats most = Floats{} + (Code == kE4M3 ? 448.0f : Code == kE4M3Fnuz ? 240.0f : 57344.0f);
    even = even > most ? most : even;
    odd = odd > most ? most : odd;
  }
  const Ints least = Ints{} + int32_t(smallest);
  const Words exp_even = (Words)((Ints)even > least ? (Ints)even : least) & kInfBits;
  const Words exp_odd = (Words)((Ints)odd > least ? (Ints)odd : least) & kInfBits;
  const Words sum_even = (Words)multiply_add((Floats)exp_even, lift, even);
  const Words sum_odd = (Words)multiply_add((Floats)exp_odd, lift, odd);
  // No half overflows into the other: the units are the low 16 bits of a sum, the exponents take 12.
  Words code = ((sum_even & 0xFFFFu) | (sum_odd << 16)) + ((exp_even >> shift) | (exp_odd >> (shift - 16))) - (base | base << 16);
  Words signs = (x.signs >> 8) & 0x00800080u;
  if (F::fnuz) signs &= (Words)((Halves)code != Halves{});
  code |= signs;
  if (!Clean) code = (nan & (F::nan_code | F::nan_code << 16)) | (~nan & code);
  return code;
}

// The codes of two pairs that were loaded one after the other as values of type T, in the order of the values.
TE_INLINE Codes pack(Words a, Words b, bool wide) {
#if defined(__AVX512F__)
  const __m512i mixed = _mm512_packus_epi16((__m512i)a, (__m512i)b);
  return (Codes)(wide ? _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), mixed)
                      : _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), mixed));
#elif defined(__AVX2__)
  const __m256i mixed = _mm256_packus_epi16((__m256i)a, (__m256i)b);
  return (Codes)(wide ? _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
                      : _mm256_permute4x64_epi64(mixed, 0xD8));
#elif defined(__x86_64__)
  (void)wide;
  return (Codes)_mm_packus_epi16((__m128i)a, (__m128i)b);
#else
  (void)wide;
  typedef uint8_t Bytes8 __attribute__((vector_size(kPair)));
  const Bytes8 parts[2] = {__builtin_convertvector((Halves)a, Bytes8), __builtin_convertvector((Halves)b, Bytes8)};
  Codes c;
  memcpy(&c, parts, sizeof(c));
  return c;
#endif
}

// stream: past the caches; `out` is aligned to the vector then.
TE_INLINE void store_codes(Codes c, uint8_t* out, bool stream) {
#if defined(__x86_64__)
  if (stream) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), (__m512i)c);
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out), (__m256i)c);
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(out), (__m128i)c);
#endif
    return;
  }
#else
  (void)stream;
#endif
  memcpy(out, &c, sizeof(c));
}

}  // namespace
}  // namespace TE_SIMD
}  // namespace te
