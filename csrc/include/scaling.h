// Scales from an amax: numerics.scale_from_amax in C++, and the names of the granularities.
#pragma once

#include <cstdint>

#include "convert.h"

namespace te {

// numerics.GRANULARITY_CODE
enum Granularity : int64_t { kTensor = 0, kRow = 1, kBlock1x128 = 2, kBlock128x128 = 3, kMx = 4, kGranularities = 5 };

constexpr int64_t kBlock = 128;
constexpr int64_t kMxBlock = 32;

struct Scale {
  float scale;      // multiplies x before the cast
  float scale_inv;  // multiplies the data afterwards
};

// Smallest e with 2^e >= x, for x > 0 and finite, cut off at -126; 0 for x == 0.
TE_INLINE int32_t ceil_log2(float x) {
  const uint32_t u = float_bits(x);
  const int32_t normal = int32_t(u >> 23) - 127 + ((u & 0x7FFFFFu) != 0 ? 1 : 0);
  const int32_t e = u < 0x00800000u ? -126 : normal;  // subnormal: at most 2^-126
  return u == 0 ? 0 : e;
}

// amax as the bits of a non-negative float; NaN and infinity allowed. Branch-free, so that a loop over blocks vectorises.
TE_INLINE Scale scale_from_amax(uint32_t amax_bits, float max, bool pow2) {
  const float amax = amax_bits == kInfBits ? kFltMax : bits_float(amax_bits);
  float scale, scale_inv;
  if (pow2) {
    int32_t e = ceil_log2(amax / max);
    e = e < -126 ? -126 : e;
    e = e > 126 ? 126 : e;
    scale = bits_float(uint32_t(127 - e) << 23);
    scale_inv = bits_float(uint32_t(127 + e) << 23);
  } else {
    scale = max / amax;
    scale = scale > kFltMax ? kFltMax : scale;
    scale_inv = 1.0f / scale;
  }
  scale = amax_bits == 0 ? 1.0f : scale;
  scale_inv = amax_bits == 0 ? 1.0f : scale_inv;
  scale = amax_bits > kInfBits ? bits_float(kNanBits) : scale;
  scale_inv = amax_bits > kInfBits ? bits_float(kNanBits) : scale_inv;
  return {scale, scale_inv};
}

// The E8M0 byte of a power of two (or NaN) made by scale_from_amax.
TE_INLINE uint8_t e8m0_encode(float scale_inv) { return scale_inv != scale_inv ? 255 : uint8_t(float_bits(scale_inv) >> 23); }

}  // namespace te
