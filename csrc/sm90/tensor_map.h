// TMA descriptors of row-major matrices, made on the host at each call (about a microsecond) and passed by value.
#pragma once
#include <cuda.h>

#include "host.h"

namespace te {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, without linking libcuda.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess)
      TVM_FFI_THROW(RuntimeError) << "this CUDA driver has no cuTensorMapEncodeTiled; version 12.0 or later is needed";
    return reinterpret_cast<EncodeTiled>(p);
  }();
  return function;
}

// One dimension of a tensor, and how much of it a box holds. pitch: bytes from one index to the next (the innermost has none).
struct MapAxis {
  int64_t size, pitch;
  int box;
};

// A tensor of RANK dimensions, innermost first; what a box reads outside of it is zero, what it writes there is left out.
template <int RANK>
CUtensorMap encode_map(const void* p, CUtensorMapDataType type, const MapAxis (&axes)[RANK], CUtensorMapSwizzle swizzle, const char* name) {
  cuuint64_t sizes[RANK], pitches[RANK];
  cuuint32_t box[RANK], steps[RANK];
  bool whole = aligned(p, 16);
  for (int i = 0; i < RANK; ++i) {
    sizes[i] = static_cast<cuuint64_t>(axes[i].size), box[i] = static_cast<cuuint32_t>(axes[i].box), steps[i] = 1;
    if (i) pitches[i - 1] = static_cast<cuuint64_t>(axes[i].pitch), whole = whole && axes[i].pitch % 16 == 0;
  }
  TE_CHECK(whole, name << " must start on 16 bytes and its rows be a multiple of 16 bytes (rows of " << axes[1].pitch << ")");
  CUtensorMap map;
  const CUresult result = encode_tiled()(&map, type, RANK, const_cast<void*>(p), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TE_CHECK(result == CUDA_SUCCESS, name << " cannot be described to the copy engine (driver code " << static_cast<int>(result) << ", " << axes[1].size
                                        << " rows of " << axes[0].size << " elements, pitch " << axes[1].pitch << " bytes)");
  return map;
}

// Values that are copied as they are: rows of `columns` elements of element_bytes (1, 2 or 4), `pitch` bytes apart.
inline CUtensorMap matrix_map(const void* p, int64_t rows, int64_t columns, int64_t pitch, int box_rows, int box_columns, int element_bytes,
                              CUtensorMapSwizzle swizzle, const char* name) {
  const auto type = element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  return encode_map<2>(p, type, {{columns, 0, box_columns}, {rows, pitch, box_rows}}, swizzle, name);
}

// GEMM operand: boxes of box_rows x 128 bytes with the 128-byte swizzle.
inline CUtensorMap operand_map(const void* p, int64_t rows, int64_t columns, int box_rows, int element_bytes, const char* name) {
  return matrix_map(p, rows, columns, columns * element_bytes, box_rows, 128 / element_bytes, element_bytes, CU_TENSOR_MAP_SWIZZLE_128B, name);
}

// GEMM result [matrices, rows, columns] in FP32: boxes of box_rows x 32 columns with the 128-byte swizzle.
inline CUtensorMap result_map(const void* p, int64_t matrices, int64_t rows, int64_t columns, int box_rows, const char* name) {
  return encode_map<3>(p, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {{columns, 0, 32}, {rows, columns * 4, box_rows}, {matrices, rows * columns * 4, 1}},
                       CU_TENSOR_MAP_SWIZZLE_128B, name);
}

// Input of a quantising kernel: boxes of 128 x 128 elements as they lie. stride in elements.
inline CUtensorMap tile_map(const void* p, int64_t rows, int64_t columns, int64_t stride, int element_bytes, const char* name) {
  return matrix_map(p, rows, columns, stride * element_bytes, 128, 128, element_bytes, CU_TENSOR_MAP_SWIZZLE_NONE, name);
}

}  // namespace te
