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

// TEMPORARY, to be measured: how a cast finds in L2 what the pass before it read last. keep_mb: the first pass asks L2 to keep its last
// so many MB; early_first: what it reads before that may go first; cast_first: so may what the cast reads; band: rows of tiles a band.
struct Reuse {
  int keep_mb = 0;
  bool early_first = false, cast_first = false;
  int band = 16;
};
inline Reuse reuse;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace te
