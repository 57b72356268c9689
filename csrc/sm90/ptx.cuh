// Thin wrappers of the Hopper instructions that CUDA C++ has no word for: mbarrier, TMA loads, wgmma, setmaxnreg, clusters.
#pragma once
#include <cuda.h>
#include <stdint.h>

namespace te::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// x, but for the compiler an unknown value made here: what depends on it is computed after this point, not kept from before it.
__device__ __forceinline__ int here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- mbarrier ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster (before a cluster barrier).
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n"
      "}" ::"r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Arrives at the barrier at the same place in block `rank` of the cluster. Without .release.cluster on purpose: that compiles to a fence
// of the whole GPU at every stage (measured: a third of the GEMM's speed), and what it would order is ordered already, since
// wgmma has read its operands (wgmma_wait) and ordinary loads have returned.
__device__ __forceinline__ void barrier_arrive_cluster(uint64_t* bar, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(bar)), "r"(rank) : "memory");
}
// ---- Cluster -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// ---- TMA -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Box at (x: innermost, y) into shared memory; bytes are counted at bar.
__device__ __forceinline__ void tma_load_2d(void* dst, const CUtensorMap* map, uint64_t* bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(dst)),
               "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_load_3d(void* dst, const CUtensorMap* map, uint64_t* bar, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(dst)),
               "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
// The same box into the same place of every block of the cluster whose bit is set in `blocks`.
__device__ __forceinline__ void tma_load_2d_multicast(void* dst, const CUtensorMap* map, uint64_t* bar, int x, int y, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(
          shared_address(dst)),
      "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}
// Consecutive bytes (a multiple of 16, both ends on 16 bytes) into shared memory; they are counted at bar.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst)), "l"(src),
               "r"(bytes), "r"(shared_address(bar))
               : "memory");
}
// Adds four floats (as bits) to global memory, without waiting for the old values. One add an element a call, so the sum is the same
// in every run; subnormal results become zero.
__device__ __forceinline__ void add_float4(float* p, uint4 v) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),
               "f"(__uint_as_float(v.w))
               : "memory");
}
// Ordinary stores to shared memory become visible to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Values in global memory that one block writes and another waits for. What the writing thread's block had stored before (behind a barrier
// of the block) is visible to the waiting one after an acquiring load, which empties L1, and not after a relaxed one.
__device__ __forceinline__ void store_release(float* p, float v) { asm volatile("st.release.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory"); }
__device__ __forceinline__ float load_acquire(const float* p) {
  float v;
  asm volatile("ld.acquire.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_relaxed(const float* p) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

// Programmatic dependent launch: everything that the kernel before in the stream wrote is visible after this.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel start (up to its own wait).
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- Warpgroups ----------------------------------------------------------------------------------------------------

template <int REGS>
__device__ __forceinline__ void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGS)); }
template <int REGS>
__device__ __forceinline__ void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGS)); }

__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Keeps the compiler from moving accumulator accesses across asynchronous wgmmas.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory matrix, K-major rows of 128 bytes with the 128-byte swizzle, 1024-byte aligned: eight rows are 1024 bytes apart.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* p) {
  return static_cast<uint64_t>((shared_address(p) & 0x3ffff) >> 4) | (uint64_t{1} << 16) | (uint64_t{64} << 32) | (uint64_t{1} << 62);
}

// Shared-memory matrix, MN-major: boxes of 64 (MN, 128 bytes) x 64 (K) with the 128-byte swizzle; eight K are 1024 bytes apart, the next
// 64 of MN 8192 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor_mn(const void* p) {
  return static_cast<uint64_t>((shared_address(p) & 0x3ffff) >> 4) | (uint64_t{512} << 16) | (uint64_t{64} << 32) | (uint64_t{1} << 62);
}

#define TE_ACC16(d, o)                                                                                                                    \
  "+f"(d[o + 0]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7]),        \
      "+f"(d[o + 8]), "+f"(d[o + 9]), "+f"(d[o + 10]), "+f"(d[o + 11]), "+f"(d[o + 12]), "+f"(d[o + 13]), "+f"(d[o + 14]), "+f"(d[o + 15])
#define TE_REGS64                                                                                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "  \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

// d[64 x 128] (+)= a[64 x 32 bytes] b[128 x 32 bytes]^T; `add` false starts from zero.
#define TE_WGMMA_M64N128(name, shape_and_types, transposes)                                                       \
  __device__ __forceinline__ void name(float (&d)[64], uint64_t a, uint64_t b, bool add) {                        \
    asm volatile(                                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned." shape_and_types                 \
        " " TE_REGS64 "%64, %65, p, 1, 1" transposes ";\n}"                                                       \
        : TE_ACC16(d, 0), TE_ACC16(d, 16), TE_ACC16(d, 32), TE_ACC16(d, 48)                                       \
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(add)));                                                        \
  }
TE_WGMMA_M64N128(wgmma_e4m3_e4m3, "m64n128k32.f32.e4m3.e4m3", "")
TE_WGMMA_M64N128(wgmma_e5m2_e4m3, "m64n128k32.f32.e5m2.e4m3", "")
TE_WGMMA_M64N128(wgmma_bf16, "m64n128k16.f32.bf16.bf16", ", 0, 0")
TE_WGMMA_M64N128(wgmma_bf16_mn, "m64n128k16.f32.bf16.bf16", ", 1, 1")
TE_WGMMA_M64N128(wgmma_bf16_b_mn, "m64n128k16.f32.bf16.bf16", ", 0, 1")

}  // namespace te::ptx
