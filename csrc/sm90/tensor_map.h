// TMA descriptors of row-major matrices, made on the host at each call (about a microsecond) and passed by value.
#pragma once
#include <cuda.h>

#include "host.h"

namespace te {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A function of the driver, without linking libcuda. version: of CUDA, as in 12000.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* p = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &p, version, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess)
    TVM_FFI_THROW(RuntimeError) << "this CUDA driver has no " << name << "; version 12.0 or later is needed";
  return reinterpret_cast<Function>(p);
}

// A thread that has made no call of the runtime yet, such as autograd's, has no context, which the driver's functions need: the first
// call gives it the device's. Not called otherwise, since a stream that is being captured allows no cudaFree.
inline void have_context() {
  static const auto current = driver_function<CUresult (*)(CUcontext*)>("cuCtxGetCurrent", 4000);
  CUcontext context = nullptr;
  if (current(&context) != CUDA_SUCCESS || context == nullptr) cudaFree(nullptr);
}

// GEMM operand: rows of `columns` elements of element_bytes (1 or 2), in boxes of box_rows x 128 bytes with the 128-byte swizzle; zeros outside.
// matrices: so many of them follow one another, and the map has three dimensions (0: it has two).
inline CUtensorMap operand_map(const void* p, int64_t rows, int64_t columns, int box_rows, int element_bytes, const char* name, int64_t matrices = 0) {
  const int64_t pitch = columns * element_bytes;
  TE_CHECK(aligned(p, 16) && pitch % 16 == 0, name << " must start on 16 bytes and its rows be a multiple of 16 bytes (rows of " << pitch << ")");
  CUtensorMap map;
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(std::max<int64_t>(matrices, 1))};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(pitch), static_cast<cuuint64_t>(rows * pitch)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / element_bytes), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  static const auto encode = driver_function<EncodeTiled>("cuTensorMapEncodeTiled", 12000);
  have_context();
  const CUresult result = encode(&map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, matrices ? 3 : 2,
                                 const_cast<void*>(p), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TE_CHECK(result == CUDA_SUCCESS, name << " cannot be described to the copy engine (driver code " << static_cast<int>(result) << ", " << rows << " rows of "
                                        << columns << " elements)");
  return map;
}

}  // namespace te
