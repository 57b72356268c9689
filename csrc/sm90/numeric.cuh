// FP8 casts, scale rules and vectors of eight elements: the device side of te_plugin/numerics.py, bit for bit.
//
// Nothing here may be compiled with fast-math: divisions and products are IEEE FP32, and denormals are kept.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace te {

using bf16 = __nv_bfloat16;

// numerics.Fp8Format.code. The FNUZ formats (2, 3) have no hardware here and are refused by the host code.
enum Format : int { kE4M3 = 0, kE5M2 = 1 };
// numerics.GRANULARITY_CODE.
enum Granularity : int { kTensor = 0, kRow = 1, kBlock1x128 = 2, kBlock128x128 = 3, kMx = 4 };

constexpr uint32_t kFloatInf = 0x7f800000u;
constexpr float kFloatMax = 3.402823466e+38f;

template <int FMT>
inline constexpr float kFormatMax = FMT == kE4M3 ? 448.f : 57344.f;

// Four FP32 values -> four FP8 codes, a in the lowest byte: nearest even, saturating (infinities too), NaN -> 0x7f. One piece of PTX, so
// that the second pair is converted straight into the upper half of the word.
template <int FMT>
__device__ __forceinline__ uint32_t cast4(float a, float b, float c, float d) {
  uint32_t packed;
  if constexpr (FMT == kE4M3)
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}" : "=r"(packed) : "f"(a), "f"(b), "f"(c), "f"(d));
  else
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}" : "=r"(packed) : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// FP8 code -> FP32. E4M3: both all-ones codes are NaN, no infinity; E5M2 is the upper byte of an FP16.
template <int FMT>
__device__ __forceinline__ float decode(uint8_t code) {
  uint32_t two;
  const uint16_t in = code;
  if constexpr (FMT == kE4M3)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(in));
  else
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(two) : "h"(in));
  return __half2float(__ushort_as_half(static_cast<unsigned short>(two & 0xffff)));
}

struct Scale {
  float scale, inv;
};

// Smallest e with 2^e >= x, clamped to +-126, for x >= 0. x == 0 gives 0 (an amax so small that amax / max underflowed).
__device__ __forceinline__ int ceil_log2_clamped(float x) {
  if (x == 0.f) return 0;
  const uint32_t bits = __float_as_uint(x);
  const int exponent = static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0);
  return max(-126, min(126, exponent));
}

__device__ __forceinline__ float exp2_int(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }

// numerics.scale_from_amax for an amax given as FP32 bits: the scale, which a cast waits for, and from it the inverse.
__device__ __forceinline__ float scale_of_amax(uint32_t amax_bits, float limit, bool pow2) {
  if (amax_bits > kFloatInf) return __uint_as_float(amax_bits);
  if (amax_bits == 0) return 1.f;
  const float finite = amax_bits == kFloatInf ? kFloatMax : __uint_as_float(amax_bits);
  if (pow2) return exp2_int(-ceil_log2_clamped(__fdiv_rn(finite, limit)));
  return fminf(__fdiv_rn(limit, finite), kFloatMax);
}
__device__ __forceinline__ float inverse_scale(float scale) { return scale == scale ? __fdiv_rn(1.f, scale) : scale; }

__device__ __forceinline__ Scale scale_from_amax(uint32_t amax_bits, float limit, bool pow2) {
  const float scale = scale_of_amax(amax_bits, limit, pow2);
  return {scale, inverse_scale(scale)};
}

// E8M0 byte of a power-of-two scale_inv; NaN -> 255.
__device__ __forceinline__ uint8_t e8m0_from_scale_inv(float inv) {
  const uint32_t bits = __float_as_uint(inv);
  return (bits & 0x7fffffffu) > kFloatInf ? 255 : static_cast<uint8_t>(bits >> 23);
}

__device__ __forceinline__ float e8m0_decode(uint8_t code) {
  if (code == 255) return __uint_as_float(0x7fc00000u);
  return code == 0 ? __uint_as_float(0x00400000u) : __uint_as_float(static_cast<uint32_t>(code) << 23);
}

// ---- Elements ------------------------------------------------------------------------------------------------------
// |x| compared as unsigned bits orders finite < inf < NaN, so an integer maximum keeps a NaN. 16-bit types keep two
// magnitudes in one word (vmaxu2), FP32 keeps one.

template <typename T>
struct Elem;

template <>
struct Elem<bf16> {
  static constexpr int kWords = 4;  // words of eight elements
  static constexpr int kPer = 2;    // elements a word
  static constexpr uint32_t kInf = 0x7f80u;
  static __device__ __forceinline__ float low(uint32_t w) { return __uint_as_float(w << 16); }
  static __device__ __forceinline__ float high(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }
  static __device__ __forceinline__ uint32_t magnitude_to_float_bits(uint32_t m) { return m << 16; }
  static __device__ __forceinline__ uint32_t pair_from_floats(float low, float high) {  // one instruction; two roundings put together are three
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
};

template <>
struct Elem<__half> {
  static constexpr int kWords = 4;
  static constexpr int kPer = 2;
  static constexpr uint32_t kInf = 0x7c00u;
  static __device__ __forceinline__ float low(uint32_t w) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(w & 0xffff)));
  }
  static __device__ __forceinline__ float high(uint32_t w) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(w >> 16)));
  }
  static __device__ __forceinline__ uint32_t magnitude_to_float_bits(uint32_t m) { return __float_as_uint(low(m)); }
  static __device__ __forceinline__ uint32_t pair_from_floats(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
};

template <>
struct Elem<float> {
  static constexpr int kWords = 8;
  static constexpr int kPer = 1;
  static constexpr uint32_t kInf = kFloatInf;
  static __device__ __forceinline__ uint32_t magnitude_to_float_bits(uint32_t m) { return m; }
  static __device__ __forceinline__ float to_float(float x) { return x; }
};

template <typename T>
__device__ __forceinline__ uint32_t abs_word(uint32_t w) {
  return w & (Elem<T>::kPer == 2 ? 0x7fff7fffu : 0x7fffffffu);
}
template <typename T>
__device__ __forceinline__ uint32_t max_word(uint32_t a, uint32_t b) {
  if constexpr (Elem<T>::kPer == 2) return __vmaxu2(a, b);
  else return max(a, b);
}
// The larger of the magnitudes inside one word.
template <typename T>
__device__ __forceinline__ uint32_t fold_word(uint32_t w) {
  if constexpr (Elem<T>::kPer == 2) return max(w & 0xffffu, w >> 16);
  else return w;
}

// Eight consecutive elements of a row.
template <typename T>
struct Vec8 {
  uint32_t w[Elem<T>::kWords];

  __device__ __forceinline__ float get(int j) const {  // j must be a compile-time constant after unrolling
    if constexpr (Elem<T>::kPer == 2) return (j & 1) ? Elem<T>::high(w[j >> 1]) : Elem<T>::low(w[j >> 1]);
    else return __uint_as_float(w[j]);
  }
  __device__ __forceinline__ void set2(int j, float a, float b) {  // elements j, j+1 (j even), rounded to T
    if constexpr (Elem<T>::kPer == 2) {
      w[j >> 1] = Elem<T>::pair_from_floats(a, b);
    } else {
      w[j] = __float_as_uint(a);
      w[j + 1] = __float_as_uint(b);
    }
  }
  __device__ __forceinline__ void add(const Vec8& other) {  // rounded to T
#pragma unroll
    for (int j = 0; j < 8; j += 2) set2(j, get(j) + other.get(j), get(j + 1) + other.get(j + 1));
  }
  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int k = 0; k < Elem<T>::kWords; ++k) w[k] = 0;
  }
  // Aligned 16-byte loads through the read-only path.
  __device__ __forceinline__ void load(const T* p) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(p));
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    if constexpr (Elem<T>::kPer == 1) {
      const uint4 b = __ldg(reinterpret_cast<const uint4*>(p) + 1);
      w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    }
  }
  __device__ __forceinline__ void load_shared(const void* p) {
    const uint4 a = static_cast<const uint4*>(p)[0];
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    if constexpr (Elem<T>::kPer == 1) {
      const uint4 b = static_cast<const uint4*>(p)[1];
      w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    }
  }
  // From global memory that this kernel writes, and so not through the read-only path.
  __device__ __forceinline__ void load_changed(const T* p) { load_shared(p); }
  // The first n of eight elements, one by one; the rest is zero. For edges and unaligned rows.
  __device__ __forceinline__ void load_some(const T* p, int n) {
    zero();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < n) {
        if constexpr (Elem<T>::kPer == 2)
          w[j >> 1] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(p)[j]) << (16 * (j & 1));
        else
          w[j] = reinterpret_cast<const uint32_t*>(p)[j];
      }
    }
  }
  __device__ __forceinline__ void store(T* p) const {
    *reinterpret_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
    if constexpr (Elem<T>::kPer == 1) reinterpret_cast<uint4*>(p)[1] = make_uint4(w[4], w[5], w[6], w[7]);
  }
  __device__ __forceinline__ void store_some(T* p, int n) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < n) {
        if constexpr (Elem<T>::kPer == 2)
          reinterpret_cast<uint16_t*>(p)[j] = static_cast<uint16_t>(w[j >> 1] >> (16 * (j & 1)));
        else
          reinterpret_cast<uint32_t*>(p)[j] = w[j];
      }
    }
  }
  // The first n of eight elements (more than eight: all, less than one: none). VEC: p is 16-byte aligned, and n a multiple of 8: the
  // element-by-element code is then not even compiled, and a bound costs a predicate.
  template <bool VEC>
  __device__ __forceinline__ void load_n(const T* p, int64_t n) {
    if (n <= 0) zero();
    else if constexpr (VEC) load(p);
    else load_some(p, n < 8 ? static_cast<int>(n) : 8);
  }
  template <bool VEC>
  __device__ __forceinline__ void store_n(T* p, int64_t n) const {
    if (n <= 0) return;
    if constexpr (VEC) store(p);
    else store_some(p, n < 8 ? static_cast<int>(n) : 8);
  }
};

}  // namespace te
