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

// TEMPORARY, to be measured: how a cast finds in L2 what the pass before it read last. keep_mb: the first pass asks L2 to keep its last
// so many MB; early_first: what it reads before that may go first; cast_first: so may what the cast reads; band: rows of tiles a band.
struct Reuse {
  int keep_mb = 0;
  bool early_first = false, cast_first = false;
  int band = 16;
};
inline Reuse reuse;

// A launch that may begin while the kernel before it in the stream ends: the kernel waits for what it needs from that one itself
// (ptx::wait_for_previous_kernel).
template <typename... P, typename... A>
void launch_overlapped(void (*kernel)(P...), unsigned grid, unsigned threads, size_t shared_bytes, cudaStream_t stream, A&&... arguments) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &overlap, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace te
