// Instruction-set levels: one source, compiled once per level, chosen at run time.
//
// A file csrc/cpu/<name>.simd.cpp is compiled with TE_SIMD = base, avx2 (x86-64-v3) and avx512 (x86-64-v4); on other processors
// with base alone. It defines its functions inside `namespace te { namespace TE_SIMD {`, and nothing outside. Declare such a
// function once with TE_SIMD_DECLARE and call it through TE_SIMD_CALL:
//
//     TE_SIMD_DECLARE(void, scale_row, (const float* x, float* y, int64_t n, float s));     // in a header
//     TE_SIMD_CALL(scale_row)(x, y, n, s);                                                  // in a plain .cpp
//
// A .simd.cpp may call, besides its own functions, only those that are `static` in its headers (convert.h is), and no inline function
// of the standard library (std::vector, std::min, ...): of an inline function the linker keeps one copy, perhaps the AVX-512 one, and
// an older processor would run it.
#pragma once

#include <cstdint>

namespace te {

enum class SimdLevel : int { base = 0, avx2 = 1, avx512 = 2 };

// The level in use: the highest that processor and system support, unless set_simd_level lowered it.
SimdLevel simd_level();

}  // namespace te

#if defined(__x86_64__)
#define TE_SIMD_DECLARE(ret, name, args) \
  namespace te {                         \
  namespace base {                       \
  ret name args;                         \
  }                                      \
  namespace avx2 {                       \
  ret name args;                         \
  }                                      \
  namespace avx512 {                     \
  ret name args;                         \
  }                                      \
  }
#define TE_SIMD_CALL(name)                                        \
  (::te::simd_level() == ::te::SimdLevel::avx512 ? ::te::avx512::name \
   : ::te::simd_level() == ::te::SimdLevel::avx2 ? ::te::avx2::name   \
                                                 : ::te::base::name)
#else
#define TE_SIMD_DECLARE(ret, name, args) \
  namespace te {                         \
  namespace base {                       \
  ret name args;                         \
  }                                      \
  }
#define TE_SIMD_CALL(name) (::te::base::name)
#endif
