// Quantise one 128 x 128 tile held in registers: row-major copy, transposed copy, scales of both and statistics from one read.
//
// 256 threads. Thread (lane l, warp w) holds rows rg*8 .. rg*8+7, columns cg*8 .. cg*8+7 with cg = l % 16, rg = 2w + l / 16:
// a half-warp reads and writes whole 128-column rows, and eight rows of a column sit in one thread, so the transposed copy
// is packed in registers and needs shared memory once (8-byte writes, 16-byte reads, both without bank conflicts).
//
// The kernels around a tile: quantize_kernels.cuh, quantize_many.cuh.
#pragma once
#include "numeric.cuh"
#include "ptx.cuh"

namespace te {

constexpr int kTile = 128;
constexpr int kQuantThreads = 256;

// What the scales are made from. kGiven: one scale for the tensor (from stats[0], or the caller's for delayed scaling);
// kAmaxArrays: row and column amax were found by an earlier pass; the others find their own in the tile.
enum QuantMode : int { kGiven = 0, kAmaxArrays = 1, kMode1x128 = 2, kMode128x128 = 3, kModeMx = 4 };

struct QuantArgs {
  int64_t R, C;             // shape of the row-major copy
  uint8_t* data;            // [R, C]
  uint8_t* data_t;          // [C, R], only with TR
  void* scale_inv;          // by mode, see docs of quantize
  void* scale_inv_t;
  float* stats;             // [2]: amax, non-finite count
  const float* scale;       // kGiven: the caller's scale; null: from stats[0]
  const int64_t* used;      // rows that hold values, on the device; the rows behind them count as 0. Null: all
  const uint32_t* row_amax; // kAmaxArrays, FP32 bits, [R]
  const uint32_t* col_amax; // kAmaxArrays with TR, [C]
  bool scales_by_block, scales_t_by_block;  // 1x128: block after block in memory, so that the scales of a tile lie together (by_block)
  bool pow2;
  bool write_stats;
  bool vec;    // 8-byte stores of data are aligned
  bool vec_t;  // 16-byte stores of data_t are aligned
};

template <typename T, int MODE, bool TR>
struct QuantSmem {
  static constexpr bool kOwnScales = MODE == kMode1x128 || MODE == kModeMx;  // scales of rows (and columns) from this tile
  static constexpr bool kLineScales = kOwnScales || MODE == kAmaxArrays;
  static constexpr int kParts = MODE == kModeMx ? 4 : 1;                     // scale blocks along 128 values
  union {
    uint4 tile[TR ? kTile * kTile / 16 : 1];
    uint32_t col_amax[TR && kOwnScales ? 8 * kTile / Elem<T>::kPer : 1];  // of the columns of each warp; read before the tile is written
  };
  alignas(16) float row_scale[kLineScales ? kParts * kTile : 4];
  alignas(16) float col_scale[kLineScales && TR ? kParts * kTile : 4];
  uint32_t warp_amax[8];
};

// Where the 1x128 scale of a block of a line lies.
__device__ __forceinline__ int64_t scale_place(int64_t line, int64_t block, int64_t lines, int64_t blocks, bool by_block) {
  return by_block ? block * lines + line : line * blocks + block;
}

// How many rows hold values; whatever the number says, not more than there are.
__device__ __forceinline__ int64_t rows_used(const int64_t* used, int64_t R) {
  return used ? max(min(*used, R), int64_t{0}) : R;
}

__device__ __forceinline__ void transpose4x4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&o)[4]) {
  const uint32_t t0 = __byte_perm(a, b, 0x5140), t1 = __byte_perm(a, b, 0x7362);
  const uint32_t t2 = __byte_perm(c, d, 0x5140), t3 = __byte_perm(c, d, 0x7362);
  o[0] = __byte_perm(t0, t2, 0x5410), o[1] = __byte_perm(t0, t2, 0x7632);
  o[2] = __byte_perm(t1, t3, 0x5410), o[3] = __byte_perm(t1, t3, 0x7632);
}

// One step of N maxima over lanes: with the lane whose number differs in bit d, each keeps the maxima of its half of the words (the second
// half where the bit is set), in m[0 .. N/2).
template <typename T, int N>
__device__ __forceinline__ void halve_maxima(uint32_t* m, int lane, int d) {
  const bool second = lane & d;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const uint32_t given = second ? m[i] : m[i + N / 2];
    m[i] = max_word<T>(second ? m[i + N / 2] : m[i], __shfl_xor_sync(0xffffffffu, given, d));
  }
}

// n, between 0 and most.
__device__ __forceinline__ int clamp(int64_t n, int most) { return static_cast<int>(max(int64_t{0}, min(n, int64_t{most}))); }

// The first n of eight bytes (more: all, less than one: none). vec: p is on 8 bytes.
__device__ __forceinline__ void store_bytes(uint8_t* p, uint2 bytes, int n, bool vec) {
  if (n >= 8 && vec) {
    *reinterpret_cast<uint2*>(p) = bytes;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < n) p[j] = static_cast<uint8_t>((j < 4 ? bytes.x : bytes.y) >> (8 * (j & 3)));
  }
}

// Adds a warp's amax (FP32 bits) and its lanes' non-finite counts to stats, once a warp and kernel.
__device__ __forceinline__ void add_stats(float* stats, uint32_t warp_amax_bits, int nonfinite, int lane) {
  uint32_t* slot = reinterpret_cast<uint32_t*>(stats);
  if (lane == 0 && warp_amax_bits > *reinterpret_cast<volatile uint32_t*>(slot)) atomicMax(slot, warp_amax_bits);
  if (warp_amax_bits >= kFloatInf) {
    const int count = __reduce_add_sync(0xffffffffu, nonfinite);
    if (lane == 0) atomicAdd(stats + 1, static_cast<float>(count));
  }
}

// Number of infinities and NaNs of a tile part; only called when the amax says there are some.
template <typename T, int N>
__device__ __forceinline__ int count_nonfinite(const Vec8<T> (&v)[N]) {
  uint32_t n = 0;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int k = 0; k < Elem<T>::kWords; ++k) {
      const uint32_t m = abs_word<T>(v[i].w[k]);
      if constexpr (Elem<T>::kPer == 2) n += ((m + 0x10001u * (0x8000u - Elem<T>::kInf)) >> 15) & 0x10001u;  // a carry into the sign bit of a half
      else n += m >= Elem<T>::kInf;
    }
  return static_cast<int>(Elem<T>::kPer == 2 ? (n & 0xffff) + (n >> 16) : n);
}

// What a thread has seen so far: largest magnitude (of T) and number of non-finite values.
struct Seen {
  uint32_t amax = 0;
  int nonfinite = 0;
};

template <typename T>
__device__ __forceinline__ void add_seen(const QuantArgs& q, const Seen& seen) {
  if (!q.write_stats) return;
  add_stats(q.stats, Elem<T>::magnitude_to_float_bits(__reduce_max_sync(0xffffffffu, seen.amax)), seen.nonfinite, threadIdx.x & 31);
}

// The one scale of kGiven; written out by the block that holds the first tile.
template <int FMT>
__device__ __forceinline__ Scale given_scale(const float* scale, const float* stats, bool pow2) {
  if (!scale) return scale_from_amax(reinterpret_cast<const uint32_t*>(stats)[0], kFormatMax<FMT>, pow2);
  return {*scale, __fdiv_rn(1.f, *scale)};
}
template <int FMT>
__device__ __forceinline__ Scale given_scale(const QuantArgs& q) {
  return given_scale<FMT>(q.scale, q.stats, q.pow2);
}

// Writes the inverse scales of rows and columns, for which no cast waits: a warp those of its rows and of as many columns, a lane one of them.
template <typename T, int MODE, bool TR>
__device__ __forceinline__ void write_scales(const QuantArgs& q, int64_t row0, int64_t col0, const QuantSmem<T, MODE, TR>& sm) {
  constexpr int kParts = QuantSmem<T, MODE, TR>::kParts, kWidth = kTile / kParts;
  if constexpr (QuantSmem<T, MODE, TR>::kOwnScales) {
    const int lane = threadIdx.x & 31, line = (threadIdx.x >> 5) * 16 + (lane & 15);
    const bool column = lane >= 16;
    if (column && !TR) return;
    const int64_t lines = column ? q.C : q.R, blocks = ((column ? q.R : q.C) + kWidth - 1) / kWidth;
    const int64_t at = (column ? col0 : row0) + line, first = (column ? row0 : col0) / kWidth;
    if (at >= lines) return;
    const float* scale = (column ? sm.col_scale : sm.row_scale) + line;
    void* out = column ? q.scale_inv_t : q.scale_inv;
    if constexpr (MODE == kMode1x128) {
      const int64_t place = scale_place(at, first, lines, blocks, column ? q.scales_t_by_block : q.scales_by_block);
      static_cast<float*>(out)[place] = inverse_scale(*scale);
    } else {
      static_assert(kParts == 4);
      uint8_t* bytes = static_cast<uint8_t*>(out) + at * blocks + first;
      uint32_t codes = 0;
#pragma unroll
      for (int part = 0; part < 4; ++part) codes |= uint32_t{e8m0_from_scale_inv(inverse_scale(scale[part * kTile]))} << (8 * part);
      if (blocks % 4 == 0 && (reinterpret_cast<uintptr_t>(bytes) & 3) == 0) {
        *reinterpret_cast<uint32_t*>(bytes) = codes;
      } else {
#pragma unroll
        for (int part = 0; part < 4; ++part)
          if (first + part < blocks) bytes[part] = static_cast<uint8_t>(codes >> (8 * part));
      }
    }
  }
}

template <typename T, int FMT, int MODE, bool TR>
__device__ __forceinline__ void quantize_tile(const Vec8<T> (&v)[8], const QuantArgs& q, int64_t row0, int64_t col0, const Scale& given,
                                              QuantSmem<T, MODE, TR>& sm, Seen& seen) {
  using E = Elem<T>;
  using Smem = QuantSmem<T, MODE, TR>;
  constexpr int kWords = E::kWords;
  constexpr float kLimit = kFormatMax<FMT>;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int cg = lane & 15, rg = warp * 2 + (lane >> 4);
  const int64_t row = row0 + rg * 8, col = col0 + cg * 8;
  const int rows = clamp(q.R - row, 8), columns = clamp(q.C - col, 8);  // of this thread inside the tensor

  // Magnitudes: columns of this thread (8 rows each), and through them the thread's maximum. Not where an earlier pass has found them.
  uint32_t column[kWords], warp_amax = 0;
  if (MODE != kAmaxArrays && (MODE != kGiven || q.write_stats)) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      column[k] = abs_word<T>(v[0].w[k]);
#pragma unroll
      for (int i = 1; i < 8; ++i) column[k] = max_word<T>(column[k], abs_word<T>(v[i].w[k]));
    }
    uint32_t m = column[0];
#pragma unroll
    for (int k = 1; k < kWords; ++k) m = max_word<T>(m, column[k]);
    m = fold_word<T>(m);
    seen.amax = max(seen.amax, m);
    if (m >= E::kInf) seen.nonfinite += count_nonfinite<T>(v);
    if constexpr (MODE == kMode128x128) warp_amax = E::magnitude_to_float_bits(__reduce_max_sync(0xffffffffu, m));
  }

  if constexpr (TR && Smem::kOwnScales) {  // two row groups of a warp together
#pragma unroll
    for (int k = 0; k < kWords; ++k) column[k] = max_word<T>(column[k], __shfl_xor_sync(0xffffffffu, column[k], 16));
    if (lane < 16) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) sm.col_amax[(warp * kTile + cg * 8) / E::kPer + k] = column[k];
    }
  }

  // The scale of the tile, or those of rows.
  float scale = given.scale;
  if constexpr (MODE == kGiven) {
    if (row0 == 0 && col0 == 0 && tid == 0) {
      static_cast<float*>(q.scale_inv)[0] = given.inv;
      if constexpr (TR) static_cast<float*>(q.scale_inv_t)[0] = given.inv;
    }
  } else if constexpr (MODE == kAmaxArrays) {
    const int line = tid % kTile;
    if (tid < kTile) sm.row_scale[line] = scale_of_amax(row0 + line < q.R ? q.row_amax[row0 + line] : 0, kLimit, q.pow2);
    else if (TR) sm.col_scale[line] = scale_of_amax(col0 + line < q.C ? q.col_amax[col0 + line] : 0, kLimit, q.pow2);
    __syncthreads();
  } else if constexpr (MODE == kMode128x128) {
    if (lane == 0) sm.warp_amax[warp] = warp_amax;
    __syncthreads();
    uint32_t block = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) block = max(block, sm.warp_amax[k]);
    const Scale s = scale_from_amax(block, kLimit, q.pow2);
    scale = s.scale;
    if (tid == 0) {
      const int64_t rb = row0 / kTile, cb = col0 / kTile;
      static_cast<float*>(q.scale_inv)[rb * ((q.C + kTile - 1) / kTile) + cb] = s.inv;
      if constexpr (TR) static_cast<float*>(q.scale_inv_t)[cb * ((q.R + kTile - 1) / kTile) + rb] = s.inv;
    }
  } else {  // 1x128 or MX: maxima of rows over 16 or 4 lanes, two rows in a word for 16-bit types; lane l ends with rows 2 (l % 4) and the next
    constexpr int kRowWords = 8 / E::kPer;
    uint32_t m[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      m[i] = abs_word<T>(v[i].w[0]);
#pragma unroll
      for (int k = 1; k < kWords; ++k) m[i] = max_word<T>(m[i], abs_word<T>(v[i].w[k]));
      m[i] = fold_word<T>(m[i]);
    }
    if constexpr (E::kPer == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) m[i] = m[2 * i] | (m[2 * i + 1] << 16);
    }
    halve_maxima<T, kRowWords>(m, lane, 2);
    halve_maxima<T, kRowWords / 2>(m, lane, 1);
    if constexpr (MODE == kMode1x128) {
#pragma unroll
      for (int d = 4; d <= 8; d *= 2)
#pragma unroll
        for (int i = 0; i < kRowWords / 4; ++i) m[i] = max_word<T>(m[i], __shfl_xor_sync(0xffffffffu, m[i], d));
    }
    const uint32_t even = E::kPer == 2 ? m[0] & 0xffff : m[0], odd = E::kPer == 2 ? m[0] >> 16 : m[1];
    float* scales = sm.row_scale + rg * 8 + 2 * (lane & 3);
    if constexpr (MODE == kMode1x128) {  // four lanes make the scales of the even rows, four those of the odd ones
      const int next = (lane >> 2) & 1;
      if (cg < 8) scales[next] = scale_of_amax(E::magnitude_to_float_bits(next ? odd : even), kLimit, q.pow2);
    } else {
      scales[cg / 4 * kTile] = scale_of_amax(E::magnitude_to_float_bits(even), kLimit, true);
      scales[cg / 4 * kTile + 1] = scale_of_amax(E::magnitude_to_float_bits(odd), kLimit, true);
    }
    __syncwarp();
  }
  if constexpr (TR && Smem::kOwnScales) {  // column scales of the transposed copy; some warps make them while the others go on
    __syncthreads();
    constexpr int kWarps = 8 / Smem::kParts;
    for (int u = tid; u < kTile * Smem::kParts; u += kQuantThreads) {
      const int c = u % kTile, part = u / kTile;
      uint32_t m = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) m = max_word<T>(m, sm.col_amax[((part * kWarps + w) * kTile + c) / E::kPer]);
      if constexpr (E::kPer == 2) m = c & 1 ? m >> 16 : m & 0xffff;
      sm.col_scale[u] = scale_of_amax(E::magnitude_to_float_bits(m), kLimit, MODE == kModeMx || q.pow2);
    }
  }
  const float* row_scales = sm.row_scale + (MODE == kModeMx ? cg / 4 * kTile : 0) + rg * 8;

  // Row-major copy. A whole tile, the same in every thread of the block, is stored without a test for each row.
  const bool whole = row0 + kTile <= q.R && col0 + kTile <= q.C;
  uint2 bytes[8];
  uint8_t* out = q.data + row * q.C + col;
#pragma unroll
  for (int i = 0; i < 8; ++i, out += q.C) {
    const float s = Smem::kLineScales ? row_scales[i] : scale;
    bytes[i] = make_uint2(cast4<FMT>(v[i].get(0) * s, v[i].get(1) * s, v[i].get(2) * s, v[i].get(3) * s),
                          cast4<FMT>(v[i].get(4) * s, v[i].get(5) * s, v[i].get(6) * s, v[i].get(7) * s));
    if (whole && q.vec) *reinterpret_cast<uint2*>(out) = bytes[i];
    else if (i < rows) store_bytes(out, bytes[i], columns, q.vec);
  }
  if constexpr (!TR) return write_scales<T>(q, row0, col0, sm);

  // Transposed copy: eight bytes of a column a thread, through shared memory. The 8-byte chunk k of column c lies at
  // k ^ (c / 8 % 16).
  uint2* tile = reinterpret_cast<uint2*>(sm.tile);
  constexpr bool kSameScale = MODE == kGiven || MODE == kMode128x128;
  if constexpr (kSameScale) {
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto half = [&](int i) { return h ? bytes[i].y : bytes[i].x; };
      transpose4x4(half(0), half(1), half(2), half(3), upper);
      transpose4x4(half(4), half(5), half(6), half(7), lower);
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[(cg * 8 + h * 4 + j) * 16 + (rg ^ cg)] = make_uint2(upper[j], lower[j]);
    }
  } else {
    if constexpr (Smem::kOwnScales) __syncthreads();  // the column scales are there, and the column maxima have been read
    Vec8<float> scales;
    scales.load_shared(sm.col_scale + (MODE == kModeMx ? (rg / 4) * kTile : 0) + cg * 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float s = scales.get(j);
      tile[(cg * 8 + j) * 16 + (rg ^ cg)] =
          make_uint2(cast4<FMT>(v[0].get(j) * s, v[1].get(j) * s, v[2].get(j) * s, v[3].get(j) * s),
                     cast4<FMT>(v[4].get(j) * s, v[5].get(j) * s, v[6].get(j) * s, v[7].get(j) * s));
    }
  }
  __syncthreads();
  // Thread t writes rows pair * 16 .. + 15 of columns t / 8 + 32 k.
  constexpr int kStep = kQuantThreads / 8;
  const int first = tid >> 3, pair = tid & 7, place = first * 8 + (pair ^ (first >> 4));
  const bool flip = (first >> 3) & 1;
  uint8_t* out_t = q.data_t + (col0 + first) * q.R + row0 + pair * 16;
  auto turned = [&](int k) {
    const uint4 w = sm.tile[(place ^ (k * kStep / 16)) + k * kStep * 8];
    return flip ? make_uint4(w.z, w.w, w.x, w.y) : w;
  };
  if (whole && q.vec_t) {
#pragma unroll
    for (int k = 0; k < kTile / kStep; ++k) *reinterpret_cast<uint4*>(out_t + k * kStep * q.R) = turned(k);
  } else {
    const int n = clamp(q.R - (row0 + pair * 16), 16);
#pragma unroll
    for (int k = 0; k < kTile / kStep; ++k) {
      if (col0 + first + k * kStep >= q.C) continue;
      const uint4 w = turned(k);
      uint8_t* p = out_t + k * kStep * q.R;
      if (n == 16 && q.vec_t) {
        *reinterpret_cast<uint4*>(p) = w;
      } else {
        store_bytes(p, make_uint2(w.x, w.y), n, false);
        store_bytes(p + 8, make_uint2(w.z, w.w), n - 8, false);
      }
    }
  }
  write_scales<T>(q, row0, col0, sm);
}

// Maxima of one tile: returns the thread's largest magnitude, counts non-finite values, and adds to row_amax and col_amax.
template <typename T>
__device__ __forceinline__ uint32_t tile_amax(const Vec8<T> (&v)[8], int64_t row0, int64_t col0, int64_t R, int64_t C, uint32_t* row_amax,
                                              uint32_t* col_amax, uint32_t (&sm)[16][kTile / Elem<T>::kPer], int& nonfinite) {
  using E = Elem<T>;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, cg = lane & 15, rg = warp * 2 + (lane >> 4);
  if (row_amax) {
    const int64_t row = row0 + rg * 8;
    uint32_t own = 0;  // of row + cg, in the first eight lanes of a half-warp
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t r = abs_word<T>(v[i].w[0]);
#pragma unroll
      for (int k = 1; k < E::kWords; ++k) r = max_word<T>(r, abs_word<T>(v[i].w[k]));
      r = fold_word<T>(r);
#pragma unroll
      for (int d = 8; d; d >>= 1) r = max(r, __shfl_xor_sync(0xffffffffu, r, d));
      if (cg == i) own = r;
    }
    if (cg < 8 && row + cg < R) atomicMax(row_amax + row + cg, E::magnitude_to_float_bits(own));
  }
  uint32_t column[E::kWords];
#pragma unroll
  for (int k = 0; k < E::kWords; ++k) {
    column[k] = abs_word<T>(v[0].w[k]);
#pragma unroll
    for (int i = 1; i < 8; ++i) column[k] = max_word<T>(column[k], abs_word<T>(v[i].w[k]));
  }
  uint32_t m = column[0];
#pragma unroll
  for (int k = 1; k < E::kWords; ++k) m = max_word<T>(m, column[k]);
  m = fold_word<T>(m);
  if (col_amax) {
#pragma unroll
    for (int k = 0; k < E::kWords; ++k) sm[rg][cg * E::kWords + k] = column[k];
    __syncthreads();
    if (tid < kTile / E::kPer) {
      uint32_t c = 0;
#pragma unroll
      for (int g = 0; g < 16; ++g) c = max_word<T>(c, sm[g][tid]);
#pragma unroll
      for (int h = 0; h < E::kPer; ++h) {
        const int64_t at = col0 + tid * E::kPer + h;
        if (at < C) atomicMax(col_amax + at, E::magnitude_to_float_bits(E::kPer == 2 ? (c >> (16 * h)) & 0xffff : c));
      }
    }
    __syncthreads();
  }
  if (m >= E::kInf) nonfinite += count_nonfinite<T>(v);
  return m;
}

}  // namespace te
