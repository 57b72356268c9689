// Conversions between FP32 and BF16, FP16, FP8, E8M0: the bits of te_plugin/numerics.py.
//
// Everything is branch-free integer and float arithmetic on one lane, so that a loop around it vectorises at every instruction-set
// level with the same bits. All functions are `static`: see the rule in simd.h.
#pragma once

#include <cstdint>
#include <cstring>

#define TE_INLINE static inline __attribute__((always_inline))

namespace te {

TE_INLINE uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

TE_INLINE float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;
constexpr float kFltMax = 3.40282346638528859812e+38f;

// ---- 16-bit floats ---------------------------------------------------------------------------------------------------------

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

TE_INLINE float to_float(float x) { return x; }
TE_INLINE float to_float(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }
TE_INLINE float to_float(f16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7FFFu);
  // Moved into FP32's fields the exponent is 112 too small; a multiplication by 2^112 mends it, subnormals included.
  const uint32_t finite = float_bits(bits_float(magnitude << 13) * bits_float((127u + 112u) << 23));
  const uint32_t special = kInfBits | (magnitude << 13);
  return bits_float((magnitude >= 0x7C00u ? special : finite) | (uint32_t(x.bits & 0x8000u) << 16));
}

TE_INLINE void from_float(float x, float* out) { *out = x; }
TE_INLINE void from_float(float x, bf16* out) {
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  out->bits = uint16_t((u & 0x7FFFFFFFu) > kInfBits ? nan : rounded);
}
TE_INLINE void from_float(float x, f16* out) {
  const uint32_t u = float_bits(x);
  const uint32_t a = u & 0x7FFFFFFFu;
  // Below 2^-14 the spacing is 2^-24: adding 0.5, whose spacing that is, makes the hardware round to it.
  const uint32_t subnormal = float_bits(bits_float(a) + 0.5f) - float_bits(0.5f);
  const uint32_t normal = (a + 0xFFFu + ((a >> 13) & 1u) - (112u << 23)) >> 13;
  uint32_t code = a < (113u << 23) ? subnormal : normal;
  code = a >= 0x477FF000u ? 0x7C00u : code;  // 65520 and above round to infinity
  code = a > kInfBits ? 0x7E00u : code;
  out->bits = uint16_t(code | ((u >> 16) & 0x8000u));
}

// ---- FP8 -------------------------------------------------------------------------------------------------------------------

// Format codes of numerics.Fp8Format.code.
enum Fp8Code : int64_t { kE4M3 = 0, kE5M2 = 1, kE4M3Fnuz = 2, kE5M2Fnuz = 3, kFp8Formats = 4 };

template <int Code>
struct Fp8;
template <>
struct Fp8<kE4M3> {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr uint32_t max_code = 0x7E, nan_code = 0x7F;
  static constexpr bool fnuz = false;
};
template <>
struct Fp8<kE5M2> {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr uint32_t max_code = 0x7B, nan_code = 0x7F;
  static constexpr bool fnuz = false;
};
template <>
struct Fp8<kE4M3Fnuz> {
  static constexpr int mantissa = 3, bias = 8;
  static constexpr uint32_t max_code = 0x7F, nan_code = 0x80;
  static constexpr bool fnuz = true;
};
template <>
struct Fp8<kE5M2Fnuz> {
  static constexpr int mantissa = 2, bias = 16;
  static constexpr uint32_t max_code = 0x7F, nan_code = 0x80;
  static constexpr bool fnuz = true;
};

TE_INLINE float fp8_max(int64_t code) { return code == kE4M3 ? 448.0f : code == kE4M3Fnuz ? 240.0f : 57344.0f; }

// Nearest even, saturating, NaN kept.
template <int Code>
TE_INLINE uint32_t fp8_encode(float x) {
  using F = Fp8<Code>;
  constexpr int shift = 23 - F::mantissa;
  constexpr uint32_t smallest_normal = uint32_t(128 - F::bias) << 23;
  constexpr uint32_t spacing = uint32_t(127 + 24 - F::bias - F::mantissa) << 23;  // a float whose spacing is the smallest subnormal
  const uint32_t u = float_bits(x);
  const uint32_t a = u & 0x7FFFFFFFu;
  const uint32_t subnormal = float_bits(bits_float(a) + bits_float(spacing)) - spacing;
  const uint32_t normal = ((a + ((a >> shift) & 1u) + ((1u << (shift - 1)) - 1u)) >> shift) - (uint32_t(127 - F::bias) << F::mantissa);
  uint32_t code = a < smallest_normal ? subnormal : normal;
  code = int32_t(code) > int32_t(F::max_code) ? F::max_code : code;
  uint32_t sign = (u >> 24) & 0x80u;
  if (F::fnuz) sign = code == 0 ? 0 : sign;
  code |= sign;
  return a > kInfBits ? F::nan_code : code;
}

template <int Code>
TE_INLINE float fp8_decode(uint32_t code) {
  using F = Fp8<Code>;
  const uint32_t magnitude = code & 0x7Fu;
  // As for FP16: the fields fit into FP32's, the exponent is off by a constant.
  uint32_t bits = float_bits(bits_float(magnitude << (23 - F::mantissa)) * bits_float(uint32_t(254 - F::bias) << 23));
  if (Code == kE4M3) bits = magnitude == 0x7Fu ? kNanBits : bits;
  if (Code == kE5M2) bits = magnitude > 0x7Cu ? kNanBits : magnitude == 0x7Cu ? kInfBits : bits;
  bits |= (code & 0x80u) << 24;
  if (F::fnuz) bits = code == 0x80u ? kNanBits : bits;
  return bits_float(bits);
}

// ---- E8M0 scales -----------------------------------------------------------------------------------------------------------

TE_INLINE float e8m0_decode(uint8_t code) {
  return bits_float(code == 255 ? kNanBits : code == 0 ? 0x00400000u : uint32_t(code) << 23);
}

}  // namespace te
