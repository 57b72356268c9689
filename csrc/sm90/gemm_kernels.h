// Which GEMM kernels exist, and in which file: TE_GEMM_KERNELS(operands, mode, scaling) makes the 256- and the 128-row kernel there;
// gemm.cu calls them by the same three names.
#pragma once
#include "gemm.cuh"

namespace te {

template <Operands OPS, Mode MODE, Scaling SCALING>
cudaError_t run_gemm(const Context& l, const CUtensorMap& a, const CUtensorMap& b, const GemmArgs& p, int waves, int64_t most_tiles);

#define TE_GEMM_KERNELS(ops, mode, scaling)                                                                                              \
  template <>                                                                                                                           \
  cudaError_t run_gemm<Operands::ops, Mode::mode, Scaling::scaling>(const Context& l, const CUtensorMap& a, const CUtensorMap& b,       \
                                                                    const GemmArgs& p, int waves, int64_t most_tiles) {                 \
    return waves == 2 ? launch_gemm<Operands::ops, Mode::mode, Scaling::scaling, 2>(l, a, b, p, most_tiles)                             \
                      : launch_gemm<Operands::ops, Mode::mode, Scaling::scaling, 1>(l, a, b, p, most_tiles);                            \
  }

}  // namespace te
