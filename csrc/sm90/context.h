// What a kernel launch needs to know, without the binding's headers: kernel files that include only this compile fast.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <utility>

namespace te {

struct Context {
  cudaStream_t stream = nullptr;
  int sms = 0;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Launches a kernel that starts while the one before it ends, and waits for what that one wrote where it needs it.
template <class... Parameters, class... Arguments>
void launch_overlapping(const Context& l, void (*kernel)(Parameters...), unsigned grid, dim3 threads, size_t smem, Arguments&&... arguments) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid), config.blockDim = threads, config.dynamicSmemBytes = smem, config.stream = l.stream;
  config.attrs = &overlap, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace te
