// What the CPU library says about itself, and its two settings: threads and instruction-set level.
#include <atomic>
#include <sstream>
#include <string>

#include "parallel.h"
#include "simd.h"
#include "tensor.h"

namespace te {
namespace {

SimdLevel detect_simd_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // x86-64-v3 and v4 as the compiler's -march names define them.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) return SimdLevel::avx512;
  if (v3) return SimdLevel::avx2;
#endif
  return SimdLevel::base;
}

std::atomic<int> chosen_level{-1};

const char* level_name(SimdLevel level) {
  return level == SimdLevel::avx512 ? "avx512" : level == SimdLevel::avx2 ? "avx2" : "base";
}

}  // namespace

SimdLevel simd_level() {
  int level = chosen_level.load(std::memory_order_relaxed);
  if (level < 0) {
    level = int(detect_simd_level());
    chosen_level.store(level, std::memory_order_relaxed);
  }
  return SimdLevel(level);
}

// For tests: results must not depend on the level. Levels the processor lacks are refused.
void set_simd_level(int64_t level) {
  const int highest = int(detect_simd_level());
  TE_CHECK(level >= 0 && level <= highest, "level is " << level << "; expected 0 to " << highest << " on this processor");
  chosen_level.store(int(level), std::memory_order_relaxed);
}

std::string build_info() {
  std::ostringstream out;
  out << "cpu library, ";
#if defined(__clang__)
  out << "clang " << __clang_major__ << "." << __clang_minor__;
#elif defined(__GNUC__)
  out << "gcc " << __GNUC__ << "." << __GNUC_MINOR__;
#else
  out << "unknown compiler";
#endif
#if defined(__x86_64__)
  out << ", x86-64";
#elif defined(__aarch64__)
  out << ", aarch64";
#endif
  out << ", instruction set " << level_name(simd_level()) << ", " << get_num_threads() << " threads";
  return out.str();
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_info, build_info);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_num_threads, set_num_threads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(get_num_threads, get_num_threads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_simd_level, set_simd_level);

}  // namespace te
