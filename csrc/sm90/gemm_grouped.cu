// Grouped GEMM, ragged M (forward, dgrad).
#include "gemm_kernels.h"

namespace te {
TE_GEMM_KERNELS(e4m3_e4m3, ragged_m, epilogue)
TE_GEMM_KERNELS(e5m2_e4m3, ragged_m, epilogue)
TE_GEMM_KERNELS(bf16, ragged_m, epilogue)
TE_GEMM_KERNELS(bf16_b_mn, ragged_m, epilogue)
TE_GEMM_KERNELS(e4m3_e4m3, ragged_m, block_b)
}  // namespace te
