// How this library's functions are exported: each call computes in the floating-point mode that C++ starts with, whoever calls.
//
// XLA's threads flush subnormal numbers to zero, and so does torch after set_flush_denormal(True): the bytes of a cast would then
// depend on the framework, or on who started the threads of the pool, which inherit the mode of the caller that makes them.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "tensor.h"

namespace te {

// The default mode for the life of this object: subnormals are kept, results are rounded to the nearest.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : before_(get()) { set(kDefault); }
  ~DefaultFloatMode() { set(before_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80;  // MXCSR: all exceptions masked
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;  // FPCR
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif

  uint64_t before_;
};

template <auto Function>
struct Exported;

template <typename R, typename... Args, R (*Function)(Args...)>
struct Exported<Function> {
  static R call(Args... args) {
    DefaultFloatMode mode;
    return Function(args...);
  }
};

}  // namespace te

#define TE_EXPORT(name) TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, Exported<&name>::call)
