// The end of a tile: 64 x 128 sums of a warpgroup, times tensor or row scales, go to C in 16-byte pieces of rows.
#pragma once
#include "gemm_tiles.cuh"
#include "ptx.cuh"

namespace te {

// What the sums are multiplied by: one number, or one a row and one a column (rows null: the number).
struct OutputScales {
  const float *rows, *columns;
  float all;
};

// Writes (or adds) one wave of a warpgroup to C, each warp its 16 rows from row0 through 2 KB of shared memory. The scales are asked for
// first, all at once: lane l brings those of columns 2l, 2l+1, 2l+64, 2l+65.
template <typename T, bool ROW_SCALES>
__device__ __forceinline__ void store_wave(const float (&d)[64], uint8_t* staging, const GemmArgs& p, T* c, int row0, int row_end, int col0,
                                           const OutputScales& scales) {
  constexpr int kColumns = 128 / sizeof(T), kVector = 16 / sizeof(T);
  // Nothing of this is worked out earlier and kept: the registers are full of sums.
  const int lane = ptx::here(threadIdx.x & 31);
  row0 = ptx::here(row0), col0 = ptx::here(col0);
  const int r = lane >> 2, q = lane & 3;
  float row_scale[2] = {scales.all, scales.all}, column_scale[2][2];
  if constexpr (ROW_SCALES) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_scale[h] = __ldg(scales.rows + min(row0 + r + 8 * h, p.M - 1));
#pragma unroll
      for (int k = 0; k < 2; ++k) column_scale[h][k] = __ldg(scales.columns + min(col0 + 64 * h + 2 * lane + k, p.N - 1));
    }
  }
#pragma unroll
  for (int part = 0; part < kBlockN / kColumns; ++part) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int group = part * (kColumns / 8) + j, at = group * 4;  // of eight columns
      float s0 = 1.f, s1 = 1.f;
      if constexpr (ROW_SCALES) {
        s0 = __shfl_sync(0xffffffffu, column_scale[group / 8][0], (group % 8) * 4 + q);
        s1 = __shfl_sync(0xffffffffu, column_scale[group / 8][1], (group % 8) * 4 + q);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = r + 8 * h;
        float x = d[at + 2 * h] * row_scale[h], y = d[at + 2 * h + 1] * row_scale[h];
        if constexpr (ROW_SCALES) x *= s0, y *= s1;
        if constexpr (sizeof(T) == 2) {
          *reinterpret_cast<__nv_bfloat162*>(staging + row * 128 + ((j ^ (row & 7)) * 16) + q * 4) = __floats2bfloat162_rn(x, y);
        } else {
          *reinterpret_cast<float2*>(staging + row * 128 + (((j * 2 + (q >> 1)) ^ (row & 7)) * 16) + (q & 1) * 8) = make_float2(x, y);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = k * 4 + (lane >> 3), chunk = lane & 7;
      uint4 v = *reinterpret_cast<const uint4*>(staging + row * 128 + ((chunk ^ (row & 7)) * 16));
      const int col = col0 + part * kColumns + chunk * kVector;
      if (row0 + row < row_end && col < p.N) {
        T* out = c + static_cast<int64_t>(row0 + row) * p.N + col;
        if (p.vector_c) {
          if constexpr (sizeof(T) == 4) {
            if (p.accumulate) {
              ptx::add_float4(out, v);
              continue;
            }
          }
          *reinterpret_cast<uint4*>(out) = v;
        } else {
          const T* values = reinterpret_cast<const T*>(staging + row * 128 + ((chunk ^ (row & 7)) * 16));
          const int n = min(kVector, p.N - col);
#pragma unroll 1
          for (int i = 0; i < n; ++i) {
            if constexpr (sizeof(T) == 4) out[i] = p.accumulate ? out[i] + values[i] : values[i];
            else out[i] = values[i];
          }
        }
      }
    }
    __syncwarp();
  }
}

// The same for a tile of C: dtype, group and scales. `warp` is the warp in its warpgroup.
template <Mode MODE, Scaling SCALING>
__device__ __forceinline__ void store_tile_wave(const float (&d)[64], uint8_t* staging, const GemmArgs& p, const Tile& t, int first_row, int warp) {
  OutputScales scales{nullptr, nullptr, 1.f};
  if constexpr (SCALING == Scaling::epilogue) {
    const int group = MODE == Mode::ragged_m ? min(t.group, p.groups - 1) : 0;
    if (p.scale_rows) scales.rows = p.scale_a, scales.columns = p.scale_b + static_cast<int64_t>(group) * p.N;
    else if (p.scale_a) scales.all = __ldg(p.scale_a) * __ldg(p.scale_b + (p.scale_b_groups ? group : 0));
  }
  const int64_t base = MODE == Mode::ragged_k ? static_cast<int64_t>(t.group) * p.M * p.N : 0;
  auto store = [&](auto* c, auto rows) {
    using T = std::remove_pointer_t<decltype(c)>;
    store_wave<T, decltype(rows)::value>(d, staging, p, c + base, t.row0 + first_row + warp * 16, t.row_end, t.col0, scales);
  };
  if (p.c_fp32) {
    if (SCALING == Scaling::epilogue && p.scale_rows) store(static_cast<float*>(p.c), std::true_type{});
    else store(static_cast<float*>(p.c), std::false_type{});
  } else {
    if (SCALING == Scaling::epilogue && p.scale_rows) store(static_cast<__nv_bfloat16*>(p.c), std::true_type{});
    else store(static_cast<__nv_bfloat16*>(p.c), std::false_type{});
  }
}

// A tile without products (an empty group, or rows past the last one): zeros, by the 256 threads that compute.
template <Mode MODE, int BM>
__device__ __forceinline__ void store_zeros(const GemmArgs& p, const Tile& t) {
  const int element = p.c_fp32 ? 4 : 2, columns = min(kBlockN, p.N - t.col0), rows = min(BM, t.row_end - t.row0);
  const int64_t base = MODE == Mode::ragged_k ? static_cast<int64_t>(t.group) * p.M * p.N : 0;
  uint8_t* c = static_cast<uint8_t*>(p.c) + (base + static_cast<int64_t>(t.row0) * p.N + t.col0) * element;
  const int unit = p.vector_c ? 16 / element : 1, per_row = columns <= 0 ? 0 : (columns + unit - 1) / unit;
  for (int u = threadIdx.x; u < rows * per_row; u += 256) {
    uint8_t* out = c + (static_cast<int64_t>(u / per_row) * p.N + u % per_row * unit) * element;
    if (p.vector_c) *reinterpret_cast<uint4*>(out) = make_uint4(0, 0, 0, 0);
    else if (p.c_fp32) *reinterpret_cast<float*>(out) = 0.f;
    else *reinterpret_cast<uint16_t*>(out) = 0;
  }
  __syncwarp();  // the compiler keeps the uniform registers of the main loop only where it sees whole warps
}

}  // namespace te
