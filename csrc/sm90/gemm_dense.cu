// Dense FP8 GEMM with tensor or row scales, and BF16.
#include "gemm_kernels.h"

namespace te {
TE_GEMM_KERNELS(e4m3_e4m3, dense, epilogue)
TE_GEMM_KERNELS(e5m2_e4m3, dense, epilogue)
TE_GEMM_KERNELS(bf16, dense, epilogue)
}  // namespace te
