// Dense GEMM into FP32 (wgrad) through the copy engine.
#include "gemm_kernels.h"

namespace te {
TE_GEMM_KERNELS(e4m3_e4m3, dense, epilogue, copy_engine)
TE_GEMM_KERNELS(e5m2_e4m3, dense, epilogue, copy_engine)
TE_GEMM_KERNELS(bf16, dense, epilogue, copy_engine)
TE_GEMM_KERNELS(e4m3_e4m3, dense, block_ab, copy_engine)
}  // namespace te
