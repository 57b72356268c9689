// Grouped GEMM, ragged K (wgrad).
#include "gemm_kernels.h"

namespace te {
TE_GEMM_KERNELS(e4m3_e4m3, ragged_k, epilogue)
TE_GEMM_KERNELS(e5m2_e4m3, ragged_k, epilogue)
TE_GEMM_KERNELS(bf16_mn, ragged_k, epilogue)
TE_GEMM_KERNELS(e4m3_e4m3, ragged_k, block_ab)
}  // namespace te
