// Grouped GEMM, ragged K (wgrad): FP32 gradients through the copy engine, others by the warps.
#include "gemm_kernels.h"

namespace te {
TE_GEMM_KERNELS(e4m3_e4m3, ragged_k, epilogue, copy_engine)
TE_GEMM_KERNELS(e5m2_e4m3, ragged_k, epilogue, copy_engine)
TE_GEMM_KERNELS(bf16_mn, ragged_k, epilogue, copy_engine)
TE_GEMM_KERNELS(e4m3_e4m3, ragged_k, block_ab, copy_engine)
TE_GEMM_KERNELS(e4m3_e4m3, ragged_k, epilogue, warps)
TE_GEMM_KERNELS(e5m2_e4m3, ragged_k, epilogue, warps)
TE_GEMM_KERNELS(bf16_mn, ragged_k, epilogue, warps)
TE_GEMM_KERNELS(e4m3_e4m3, ragged_k, block_ab, warps)
}  // namespace te
