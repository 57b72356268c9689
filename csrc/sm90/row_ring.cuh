// Rows on their way: a ring of stages in shared memory that bulk copies fill several rows ahead of a persistent block.
//
// A block computes rows blockIdx.x, blockIdx.x + gridDim.x, ...; a stage holds one row of each input. Registers have room for one row
// ahead at most, and then the memory idles whenever a row is computed: 4 TB/s with 1 us from request to data is 30 KB under way on every SM
// all the time.
#pragma once
#include "block_row.cuh"
#include "ptx.cuh"

namespace te {

// Up to three tensors [R, C] whose rows may be apart.
template <typename T>
struct RowInputs {
  const T* p[3];
  int64_t stride[3];
};

// BLOCKS share an SM. The rows must start on 16 bytes and be whole vectors of eight, at most VECS a thread.
template <typename T, int VECS, int INPUTS, int BLOCKS>
class RowRing {
  static constexpr int kRowBytes = kRowThreads * 8 * VECS * static_cast<int>(sizeof(T));
  static constexpr int kStageBytes = INPUTS * kRowBytes;
  // An SM has 228 KB; a block pays 1 KB to the system and has its barriers and sums in another.
  static constexpr int kFit = (228 / BLOCKS - 2) * 1024 / kStageBytes;

 public:
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr bool kFits = kStages >= 2;
  static constexpr int kSmem = kStages * kStageBytes;

  // stages: kSmem bytes of shared memory on 16 bytes; full: kStages words of it. To be called by the whole block.
  __device__ __forceinline__ RowRing(uint8_t* stages, uint64_t* full, const RowInputs<T>& in, int64_t R, int C)
      : stages_(stages), full_(full), in_(in), R_(R), C_(C) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) ptx::barrier_init(full + s, 1);
      ptx::fence_barrier_init();
#pragma unroll 1
      for (int s = 0; s < kStages - 1; ++s) fetch(blockIdx.x + static_cast<int64_t>(s) * gridDim.x, s);
    }
    __syncthreads();
  }

  // Until the block's next row is there.
  __device__ __forceinline__ void wait() { ptx::barrier_wait(full_ + stage_, phase_); }

  // Vector k of this thread (row_column) from an input's row; zeros past its end.
  __device__ __forceinline__ void load(int input, int k, Vec8<T>& v) const {
    const int c = row_column(k);
    if (c < C_) v.load_shared(stages_ + stage_ * kStageBytes + input * kRowBytes + c * static_cast<int>(sizeof(T)));
    else v.zero();
  }

  // Asks for a row further on. To be called once a row r, by the whole block, behind a barrier of the block that follows wait():
  // only then has every thread read the row before r, whose stage is filled again. Row r may still be read.
  __device__ __forceinline__ void refill(int64_t r) {
    if (threadIdx.x == 0) fetch(r + (kStages - 1) * static_cast<int64_t>(gridDim.x), stage_ ? stage_ - 1 : kStages - 1);
  }

  // Row r is done with.
  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) stage_ = 0, phase_ ^= 1;
  }

 private:
  __device__ __forceinline__ void fetch(int64_t r, int stage) {
    if (r >= R_) return;
    const uint32_t bytes = C_ * static_cast<uint32_t>(sizeof(T));
    ptx::barrier_arrive_expect(full_ + stage, INPUTS * bytes);
#pragma unroll
    for (int i = 0; i < INPUTS; ++i)
      ptx::bulk_load(stages_ + stage * kStageBytes + i * kRowBytes, in_.p[i] + r * in_.stride[i], bytes, full_ + stage);
  }

  uint8_t* stages_;
  uint64_t* full_;
  const RowInputs<T>& in_;
  int64_t R_;
  int C_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

// The same rows straight from memory, one after the other.
template <typename T, bool VEC>
class RowsInMemory {
 public:
  __device__ __forceinline__ RowsInMemory(uint8_t*, uint64_t*, const RowInputs<T>& in, int64_t, int C) : in_(in), C_(C) {}
  __device__ __forceinline__ void wait() {}
  __device__ __forceinline__ void load(int input, int k, Vec8<T>& v) const {
    const int c = row_column(k);
    v.template load_n<VEC>(in_.p[input] + row_ * in_.stride[input] + c, C_ - c);
  }
  __device__ __forceinline__ void refill(int64_t) {}
  __device__ __forceinline__ void advance() { row_ += gridDim.x; }

 private:
  const RowInputs<T>& in_;
  int C_;
  int64_t row_ = blockIdx.x;
};

}  // namespace te
