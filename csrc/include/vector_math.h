// exp, sine and cosine of one lane, branch-free, so that a loop around them vectorises; same bits at every instruction-set level and
// on every machine (no call into the C library). All functions are `static`: see the rule in simd.h.
#pragma once

#include <cstdint>

#include "convert.h"

namespace te {

// e^x for FP32, about 1 ulp. Results below the smallest normal number are 0, above the largest infinity; NaN stays.
TE_INLINE float fast_exp(float x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -87.5f ? -87.5f : x > 89.0f ? 89.0f : x;
  const float shifted = clamped * 1.44269504088896341f + magic;
  const float n = shifted - magic;
  float r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // n is -126 .. 128; as 2^(n-1) * 2 the factor stays a normal number at the upper end and the overflow happens by itself.
  const float power = bits_float(((float_bits(shifted) - float_bits(magic)) + 126u) << 23);
  const float y = x < -87.3365478515625f ? 0.0f : p * power * 2.0f;
  return x != x ? x : y;
}

struct SinCos {
  float sine, cosine;
};

// Sine and cosine of an FP32 angle, right to FP32 for |angle| up to about 2^30: the reduction is done in FP64.
TE_INLINE SinCos fast_sincos(float angle) {
  constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52
  const double a = double(angle);
  const double shifted = a * 0.63661977236758134308 + magic;
  uint64_t bits;
  memcpy(&bits, &shifted, 8);
  const double n = shifted - magic;
  const double r = (a - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11;
  const double z = r * r;
  double s = -2.50507602534068634195e-8;
  s = s * z + 2.75573137070700676789e-6;
  s = s * z - 1.98412698298579493134e-4;
  s = s * z + 8.33333333332248946124e-3;
  s = s * z - 1.66666666666666324348e-1;
  s = r + r * z * s;
  double c = 2.08757232129817482790e-9;
  c = c * z - 2.75573143513906633035e-7;
  c = c * z + 2.48015872894767294178e-5;
  c = c * z - 1.38888888888741095749e-3;
  c = c * z + 4.16666666666666019037e-2;
  c = 1.0 - 0.5 * z + z * z * c;
  const uint64_t quadrant = bits & 3u;
  const double sine = (quadrant & 1u) != 0 ? c : s;
  const double cosine = (quadrant & 1u) != 0 ? s : c;
  return {float((quadrant & 2u) != 0 ? -sine : sine), float(((quadrant + 1u) & 2u) != 0 ? -cosine : cosine)};
}

}  // namespace te
