// Dense block-scaled FP8 GEMM: 1x128 x 128x128 (forward, dgrad) and 1x128 x 1x128 (wgrad).
#include "gemm_kernels.h"

namespace te {
TE_GEMM_KERNELS(e4m3_e4m3, dense, block_b)
TE_GEMM_KERNELS(e4m3_e4m3, dense, block_ab)
}  // namespace te
