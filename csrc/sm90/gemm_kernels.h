// Which GEMM kernels exist, and in which file: TE_GEMM_KERNELS(operands, mode, scaling, store) makes the 256- and the 128-row kernel
// there; gemm.cu calls them by the same four names.
#pragma once
#include "gemm.cuh"

namespace te {

template <Operands OPS, Mode MODE, Scaling SCALING, Store STORE>
cudaError_t run_gemm(const Context& l, const GemmMaps& maps, const GemmArgs& p, int waves, int64_t most_tiles);

#define TE_GEMM_KERNELS(ops, mode, scaling, store)                                                                                            \
  template <>                                                                                                                                \
  cudaError_t run_gemm<Operands::ops, Mode::mode, Scaling::scaling, Store::store>(const Context& l, const GemmMaps& maps, const GemmArgs& p,  \
                                                                                  int waves, int64_t most_tiles) {                           \
    return waves == 2 ? launch_gemm<Operands::ops, Mode::mode, Scaling::scaling, Store::store, 2>(l, maps, p, most_tiles)                    \
                      : launch_gemm<Operands::ops, Mode::mode, Scaling::scaling, Store::store, 1>(l, maps, p, most_tiles);                   \
  }

}  // namespace te
