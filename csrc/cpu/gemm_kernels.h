// The blocked FP32 matrix product behind grouped GEMM, at every instruction-set level (simd.h).
#pragma once

#include <cstdint>

#include "simd.h"

namespace te {

// An operand: element (i, k) lies at p + i * outer + k * inner (in elements); k is what the product sums over.
struct GemmOperand {
  const void* p;
  int dtype;  // RowDtype
  int64_t outer, inner;
};

// One output tile: c[i, j] (+)= sum over k < depth of a(i, k) * b(j, k), with i < rows, j < cols, both at most kGemmTile.
struct GemmTile {
  GemmOperand a, b;
  int64_t rows, cols, depth;
  void* c;
  int c_dtype;
  int64_t c_ld;
  bool accumulate;
};

constexpr int64_t kGemmTile = 192;   // rows and columns of a tile
constexpr int64_t kGemmDepth = 256;  // terms handled at once
// Floats of scratch that gemm_tile needs: a packed slice of both operands, with room for whole strips, and the FP32 tile.
constexpr int64_t kGemmScratch = 2 * (kGemmTile + 32) * kGemmDepth + (kGemmTile + 32) * (kGemmTile + 32);

}  // namespace te

// Sums run over k in ascending order in FP32, whatever the tile's neighbours do.
TE_SIMD_DECLARE(void, gemm_tile, (const GemmTile& t, float* scratch))
