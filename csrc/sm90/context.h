// What a kernel launch needs to know, without the binding's headers: kernel files that include only this compile fast.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace te {

struct Context {
  cudaStream_t stream = nullptr;
  int sms = 0;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Lets a kernel have more than 48 KB of dynamic shared memory, once on each device; `allowed` belongs to the kernel and has a bit a device.
// A failure shows at the launch.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes, std::atomic<uint64_t>& allowed) {
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (allowed.load(std::memory_order_relaxed) & bit) return;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess) allowed |= bit;
}

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
