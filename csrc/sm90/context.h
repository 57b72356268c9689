// What a kernel launch needs to know, without the binding's headers: kernel files that include only this compile fast.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>

namespace te {

struct Context {
  cudaStream_t stream = nullptr;
  int sms = 0;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace te
