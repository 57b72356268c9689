// Stream-ordered scratch memory: taken and given back on the caller's stream, so it needs no synchronisation and may be captured
// in a CUDA graph. It comes from a pool of our own that keeps its memory: the device's default pool gives memory back to the
// driver at every synchronisation, which makes the next call slow.
#pragma once
#include "host.h"

namespace te {

inline cudaMemPool_t scratch_pool(int device) {
  static cudaMemPool_t pools[64] = {};
  cudaMemPool_t& pool = pools[device & 63];
  if (!pool) {
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = device;
    const cudaError_t status = cudaMemPoolCreate(&pool, &props);
    if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "no memory pool for scratch: " << cudaGetErrorString(status);
    uint64_t keep = UINT64_MAX;
    cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep);
  }
  return pool;
}

class Scratch {
 public:
  Scratch(int device, cudaStream_t stream, size_t bytes) : stream_(stream) {
    const cudaError_t status = cudaMallocFromPoolAsync(&p_, bytes ? bytes : 1, scratch_pool(device), stream);
    if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "no scratch memory of " << bytes << " bytes: " << cudaGetErrorString(status);
  }
  ~Scratch() { cudaFreeAsync(p_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <typename P>
  P* as() const { return static_cast<P*>(p_); }

 private:
  void* p_ = nullptr;
  cudaStream_t stream_;
};

}  // namespace te
