// Quantise and dequantise: checks, the scales, and how the work is cut into tasks. The numbers are defined at the head of
// te_plugin/numerics.py; the inner loops are in quantize.simd.cpp.
//
// A matrix is cut into tiles; a tile is one task. Kinds whose scale needs more than one tile (tensor, row) read x twice: first every
// tile's amax, then the encoding. Block kinds, and delayed scaling, read it once.
#include <cmath>
#include <memory>
#include <vector>

#include "export.h"
#include "parallel.h"
#include "quantize_kernels.h"
#include "scaling.h"
#include "tensor.h"

namespace te {
namespace {

constexpr int64_t kTaskElements = 64 * 1024;  // of a task that needs no square
constexpr int64_t kMaxRun = 8192;             // longest piece of a row in one task
constexpr int64_t kSide = kMostCols;          // side of the largest square
constexpr int64_t kSquareLd = kSide + 64;     // bytes from row to row of a square's codes: no power of two, which caches dislike
constexpr int64_t kStrip = 64;                // columns of a square turned at once
constexpr int64_t kStepRows = 4;              // rows whose blocks are scaled at once: they stay in the L1 cache
constexpr int64_t kAhead = 2;                 // rows fetched ahead while one is encoded
constexpr int64_t kStepGroups = kStepRows * kMaxRun / kMxBlock;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

const char* granularity_name(int64_t g) {
  static const char* names[] = {"tensor", "row", "block_1x128", "block_128x128", "mx"};
  return names[g];
}

// ---- checks ----------------------------------------------------------------------------------------------------------------

void check_format(int64_t format) {
  TE_CHECK(format >= 0 && format < kFp8Formats,
           "format is " << format << "; expected 0 (e4m3), 1 (e5m2), 2 (e4m3_fnuz) or 3 (e5m2_fnuz)");
}

void check_granularity(int64_t granularity) {
  TE_CHECK(granularity >= 0 && granularity < kGranularities,
           "granularity is " << granularity << "; expected 0 (tensor), 1 (row), 2 (block_1x128), 3 (block_128x128) or 4 (mx)");
}

// FP8 bytes, or a float8 tensor of just this format: the variant belongs to the tensor and is never reinterpreted.
void check_fp8(const TensorView& t, const char* name, int64_t format, int64_t rows, int64_t cols, const char* why) {
  check_device(t, name, kDLCPU);
  check_dtype(t, name, {DType::u8, DType::f8});
  static const uint8_t codes[] = {kDLFloat8_e4m3fn, kDLFloat8_e5m2, kDLFloat8_e4m3fnuz, kDLFloat8_e5m2fnuz};
  static const char* names[] = {"e4m3", "e5m2", "e4m3_fnuz", "e5m2_fnuz"};
  TE_CHECK(dtype_of(t) == DType::u8 || t.dtype().code == codes[format],
           name << " is a float8 tensor of another kind than format " << names[format] << "; pass that float8 dtype, or uint8");
  check_shape(t, name, {rows, cols}, why);
  check_contiguous(t, name);
}

void check_scale_inv(const TensorView& t, const char* name, int64_t granularity, int64_t rows, int64_t cols) {
  check_device(t, name, kDLCPU);
  if (granularity == kMx) {
    TE_CHECK(dtype_of(t) == DType::u8 || (dtype_of(t) == DType::f8 && t.dtype().code == kDLFloat8_e8m0fnu),
             name << " is " << describe(t) << "; expected uint8 (E8M0 exponents) for granularity mx");
  } else {
    check_dtype(t, name, {DType::f32});
  }
  const std::string why = std::string("granularity ") + granularity_name(granularity);
  switch (granularity) {
    case kTensor: check_shape(t, name, {1}, why.c_str()); break;
    case kRow: check_shape(t, name, {rows}, why.c_str()); break;
    case kBlock1x128: check_shape(t, name, {rows, ceil_div(cols, kBlock)}, why.c_str()); break;
    case kBlock128x128: check_shape(t, name, {ceil_div(rows, kBlock), ceil_div(cols, kBlock)}, why.c_str()); break;
    default: check_shape(t, name, {rows, ceil_div(cols, kMxBlock)}, why.c_str()); break;
  }
  check_contiguous(t, name);
}

Matrix matrix_of(const TensorView& x) {
  const DType d = dtype_of(x);
  return {data<void>(x), d == DType::f32 ? kF32 : d == DType::bf16 ? kBf16 : kF16, x.size(0) > 1 ? x.stride(0) : 0};
}

Matrix part(Matrix m, int64_t row, int64_t col) {
  const int64_t size = m.dtype == kF32 ? 4 : 2;
  return {static_cast<const char*>(m.x) + (row * m.ld + col) * size, m.dtype, m.ld};
}

// ---- one quantise call -----------------------------------------------------------------------------------------------------

struct Tile {
  int64_t index, row, col, rows, cols;
};

// How a matrix is cut into tiles; the tile is a task.
struct Cut {
  int64_t rows = 0, cols = 0, height = 1, width = 1, bands = 0, chunks = 0;

  Cut() = default;
  Cut(int64_t rows, int64_t cols, int64_t height, int64_t width)
      : rows(rows), cols(cols), height(height), width(width), bands(ceil_div(rows, height)), chunks(ceil_div(cols, width)) {}

  int64_t tiles() const { return bands * chunks; }

  // body(tile) for every tile. backwards: from the last tile on, for a second reading of x: the end of the first is still in the cache.
  template <typename F>
  void for_each(const F& body, bool backwards = false) const {
    parallel_for(tiles(), [&](int64_t task) {
      const int64_t i = backwards ? tiles() - 1 - task : task;
      const int64_t row = i / chunks * height, col = i % chunks * width;
      body(Tile{i, row, col, min64(height, rows - row), min64(width, cols - col)});
#if defined(__x86_64__)
      __builtin_ia32_sfence();  // for what copy_rows wrote past the caches
#endif
    });
  }
};

// Runs of whole rows where that is possible: memory is read fastest in order.
Cut long_cut(int64_t rows, int64_t cols) {
  const int64_t width = cols < kMaxRun ? (cols > 0 ? cols : 1) : kMaxRun;
  return {rows, cols, min64(kBlock, ceil_div(kTaskElements, width)), width};
}

// Squares: a transposed copy then reads and writes runs of the square's side. Small matrices get smaller ones, enough for all threads.
Cut square_cut(int64_t rows, int64_t cols) {
  const int64_t side = rows * cols >= (1 << 22) ? kSide : rows * cols >= (1 << 20) ? kSide / 2 : kBlock;
  return {rows, cols, side, side};
}

struct Quantize {
  Matrix x;
  int64_t rows, cols, format;
  bool pow2;
  bool transposed;
  uint8_t* data;
  uint8_t* data_t = nullptr;
  float* scale_inv = nullptr;  // null: not asked for, or scale_byte instead
  float* scale_inv_t = nullptr;
  uint8_t* scale_byte = nullptr;  // granularity mx
  uint8_t* scale_byte_t = nullptr;
  bool stream = false;  // results too large for the caches go past them

  std::vector<uint32_t> tile_amax = {};
  std::vector<int64_t> tile_nonfinite = {};

  // ---- statistics, one entry per tile of the cut that reads x first

  void begin_statistics(const Cut& cut) {
    tile_amax.assign(cut.tiles(), 0);
    tile_nonfinite.assign(cut.tiles(), 0);
  }
  void note(const Tile& t, uint32_t amax_bits) {
    if (amax_bits > tile_amax[t.index]) tile_amax[t.index] = amax_bits;
  }
  // Counting is rare work: an amax below infinity says that there is nothing to count.
  void count(const Tile& t) {
    if (tile_amax[t.index] >= kInfBits) tile_nonfinite[t.index] = TE_SIMD_CALL(count_nonfinite)(part(x, t.row, t.col), t.rows, t.cols);
  }
  // Notes the amax of rows r .. of a tile; out: that of each row.
  void note_rows(const Tile& t, int64_t r, int64_t n_rows, uint32_t* out) {
    TE_SIMD_CALL(amax_rows)(part(x, t.row + r, t.col), n_rows, t.cols, t.cols, out);
    for (int64_t i = 0; i < n_rows; ++i) note(t, out[i]);
  }
  // note_rows for a row's pieces of `group` columns, out[row, piece]; out_cols: the amax of each column.
  void note_both(const Tile& t, int64_t r, int64_t n_rows, int64_t group, uint32_t* out, uint32_t* out_cols) {
    TE_SIMD_CALL(amax_both)(part(x, t.row + r, t.col), n_rows, t.cols, group, out, out_cols);
    for (int64_t c = 0; c < t.cols; ++c) note(t, out_cols[c]);
  }
  uint32_t amax() const {
    uint32_t best = 0;
    for (uint32_t v : tile_amax) best = v > best ? v : best;
    return best;
  }
  void write_stats(float* stats) const {
    const uint32_t best = amax();
    int64_t bad = 0;
    for (int64_t n : tile_nonfinite) bad += n;
    stats[0] = bits_float(best > kInfBits ? kNanBits : best);
    stats[1] = float(bad);
  }

  // ---- scales

  // n scales into places `first`, first + step, ... of whichever kind of scale there is.
  static void put(uint8_t* bytes, float* floats, int64_t first, int64_t step, const float* value, int64_t n) {
    if (bytes != nullptr) {
      for (int64_t i = 0; i < n; ++i) bytes[first + i * step] = e8m0_encode(value[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) floats[first + i * step] = value[i];
    }
  }
  void write_scales(int64_t first, const float* value, int64_t n) const { put(scale_byte, scale_inv, first, 1, value, n); }
  void write_scales_t(int64_t first, int64_t step, const float* value, int64_t n) const {
    put(scale_byte_t, scale_inv_t, first, step, value, n);
  }
  Scale scale_of(uint32_t amax_bits) const { return scale_from_amax(amax_bits, fp8_max(format), pow2); }

  // ---- encoding

  // Rows row .. of x, columns col .. with scales[r * scale_ld + c / group], r and c counted from (row, col), into `data`.
  void encode(int64_t row, int64_t col, int64_t n_rows, int64_t n_cols, const float* scales, int64_t scale_ld, int64_t group,
              bool clean, int64_t ahead) const {
    TE_SIMD_CALL(encode_rows)(part(x, row, col), n_rows, n_cols, scales, scale_ld, group, format, clean, ahead,
                              data + row * cols + col, cols, nullptr, 0, stream);
  }

  // How many rows ahead to fetch, for rows r .. of a tile that go by bands of `height`: the amax of the next band, quick as it is, then
  // finds its rows in the cache. 0 in the last band, whose next is another task's.
  static int64_t next_band(const Tile& t, int64_t r, int64_t height) { return r + height < t.rows ? height : 0; }

  // Row r of a square's codes, counted from the square's corner.
  static uint8_t* codes_row(int64_t r) { return workspace() + r * kSquareLd; }

  // encode, keeping the codes for the transposed copy, which has the same scales.
  void encode_keeping(const Tile& t, int64_t r, int64_t n_rows, const float* scales, int64_t scale_ld, int64_t group, bool clean,
                      int64_t ahead) const {
    TE_SIMD_CALL(encode_rows)(part(x, t.row + r, t.col), n_rows, t.cols, scales, scale_ld, group, format, clean, ahead,
                              data + (t.row + r) * cols + t.col, cols, codes_row(r), kSquareLd, stream);
  }

  // Rows r .. of a square with scales per row (as in `encode`), and with scales per column for the transposed copy.
  void encode_both(const Tile& t, int64_t r, int64_t n_rows, const float* scales, int64_t scale_ld, int64_t group,
                   const float* col_scales, bool clean, int64_t ahead) const {
    TE_SIMD_CALL(encode_both)(part(x, t.row + r, t.col), n_rows, t.cols, scales, scale_ld, group, col_scales, format, clean, ahead,
                              data + (t.row + r) * cols + t.col, cols, codes_row(r), kSquareLd, stream);
  }

  // The kept codes of a square, turned, into data_t. While one strip is turned, bit by bit, the one before is written, for the same
  // reason as above.
  void write_transposed(const Tile& t) const {
    uint8_t* strips[2] = {workspace() + kSide * kSquareLd, workspace() + (kSide + kStrip) * kSquareLd};
    int64_t turned = 0;  // rows of data_t in the strip before
    for (int64_t c = 0; c < t.cols + kStrip; c += kStrip) {
      const int64_t n = c < t.cols ? min64(kStrip, t.cols - c) : 0;
      uint8_t *now = strips[c / kStrip % 2], *before = strips[1 - c / kStrip % 2];
      const int64_t pieces = ceil_div(t.rows, kStrip), share = ceil_div(turned, pieces);
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t r = i * kStrip, first = min64(i * share, turned);
        if (n > 0) TE_SIMD_CALL(transpose_bytes)(codes_row(r) + c, kSquareLd, min64(kStrip, t.rows - r), n, now + r, kSquareLd);
        TE_SIMD_CALL(copy_rows)(before + first * kSquareLd, kSquareLd, min64(share, turned - first), t.rows,
                                data_t + (t.col + c - kStrip + first) * rows + t.row, rows, stream);
      }
      turned = n;
    }
  }

  // A worker's codes of one square and two turned strips; kept, so that the pages are touched once.
  static uint8_t* workspace() {
    static thread_local std::unique_ptr<uint8_t[]> memory(new uint8_t[(kSide + 2 * kStrip) * kSquareLd + 64]);
    return memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64);
  }

  // ---- the kinds of scaling

  // One scale for the whole tensor, known beforehand (delayed) or not.
  void run_tensor(const float* given_scale) {
    const Cut second = transposed ? square_cut(rows, cols) : long_cut(rows, cols);
    const Cut first = given_scale != nullptr ? second : long_cut(rows, cols);
    begin_statistics(first);
    Scale s;
    auto encode_piece = [&](const Tile& t, int64_t r, int64_t n_rows, bool clean, int64_t ahead) {
      if (transposed) encode_keeping(t, r, n_rows, &s.scale, 0, t.cols, clean, ahead);
      else encode(t.row + r, t.col, n_rows, t.cols, &s.scale, 0, t.cols, clean, ahead);
    };
    if (given_scale != nullptr) {
      s = {*given_scale, 1.0f / *given_scale};
      first.for_each([&](const Tile& t) {
        for (int64_t r = 0; r < t.rows; r += kStepRows) {
          const int64_t n_rows = min64(kStepRows, t.rows - r);
          uint32_t row_amax[kStepRows];
          note_rows(t, r, n_rows, row_amax);
          const uint32_t so_far = tile_amax[t.index];
          encode_piece(t, r, n_rows, so_far < kInfBits && bits_float(so_far) * s.scale <= fp8_max(format), next_band(t, r, kStepRows));
        }
        count(t);
        if (transposed) write_transposed(t);
      });
    } else {
      first.for_each([&](const Tile& t) {
        uint32_t row_amax[kSide];
        note_rows(t, 0, t.rows, row_amax);
        count(t);
      });
      s = scale_of(amax());
      const bool clean = amax() < kInfBits;
      second.for_each([&](const Tile& t) {
        encode_piece(t, 0, t.rows, clean, kAhead);
        if (transposed) write_transposed(t);
      }, true);
    }
    write_scales(0, &s.scale_inv, 1);
    if (scale_inv_t != nullptr) write_scales_t(0, 1, &s.scale_inv, 1);
  }

  // A scale per row; the transposed copy has a scale per column.
  void run_rows() {
    const Cut cut = transposed ? square_cut(rows, cols) : long_cut(rows, cols);
    begin_statistics(cut);
    std::vector<uint32_t> row_amax(cut.chunks * rows), col_amax(transposed ? cut.bands * cols : 0);
    cut.for_each([&](const Tile& t) {
      uint32_t* of_rows = row_amax.data() + t.index % cut.chunks * rows + t.row;
      if (transposed) note_both(t, 0, t.rows, t.cols, of_rows, col_amax.data() + t.index / cut.chunks * cols + t.col);
      else note_rows(t, 0, t.rows, of_rows);
      count(t);
    });
    const std::vector<float> row_scale = reduce(row_amax, cut.chunks, rows, scale_inv);
    const std::vector<float> col_scale = transposed ? reduce(col_amax, cut.bands, cols, scale_inv_t) : std::vector<float>();
    const bool clean = amax() < kInfBits;
    cut.for_each([&](const Tile& t) {
      if (!transposed) return encode(t.row, t.col, t.rows, t.cols, row_scale.data() + t.row, 1, t.cols, clean, kAhead);
      encode_both(t, 0, t.rows, row_scale.data() + t.row, 1, t.cols, col_scale.data() + t.col, clean, kAhead);
      write_transposed(t);
    }, true);
  }

  // n scales, and scale_inv of each, from the amax of `count` parts, parts[p * n + i].
  std::vector<float> reduce(std::vector<uint32_t>& parts, int64_t count, int64_t n, float* inverse) const {
    std::vector<float> scales(n);
    parts.resize(count > 0 ? count * n : n, 0);
    for (int64_t p = 1; p < count; ++p) {
      for (int64_t i = 0; i < n; ++i) parts[i] = parts[p * n + i] > parts[i] ? parts[p * n + i] : parts[i];
    }
    TE_SIMD_CALL(scales_from_amax)(parts.data(), n, fp8_max(format), pow2, scales.data(), inverse);
    return scales;
  }

  // A scale per 1 x `group` (128, or 32 for mx).
  void run_row_blocks(int64_t group) {
    if (transposed) return run_row_blocks_twice(group);
    const Cut cut = long_cut(rows, cols);
    begin_statistics(cut);
    const int64_t across = ceil_div(cols, group);
    cut.for_each([&](const Tile& t) {
      const int64_t groups = ceil_div(t.cols, group);
      for (int64_t r = 0; r < t.rows; r += kStepRows) {
        const int64_t n_rows = min64(kStepRows, t.rows - r);
        uint32_t amax_bits[kStepGroups];
        float scales[kStepGroups], inverse[kStepGroups];
        TE_SIMD_CALL(amax_rows)(part(x, t.row + r, t.col), n_rows, t.cols, group, amax_bits);
        note(t, TE_SIMD_CALL(scales_from_amax)(amax_bits, n_rows * groups, fp8_max(format), pow2, scales, inverse));
        for (int64_t i = 0; i < n_rows; ++i) write_scales((t.row + r + i) * across + t.col / group, inverse + i * groups, groups);
        encode(t.row + r, t.col, n_rows, t.cols, scales, groups, group, tile_amax[t.index] < kInfBits, next_band(t, r, kStepRows));
      }
      count(t);
    });
  }

  // The same, with a transposed copy, whose scales are its own, along its own rows: `group` rows of x make one of its blocks.
  void run_row_blocks_twice(int64_t group) {
    const Cut cut = square_cut(rows, cols);
    begin_statistics(cut);
    const int64_t across = ceil_div(cols, group), down = ceil_div(rows, group);
    cut.for_each([&](const Tile& t) {
      const int64_t groups = ceil_div(t.cols, group), bands = ceil_div(t.rows, group);
      float inverse_t[kSide / kMxBlock * kSide];  // [band, column]
      for (int64_t r = 0; r < t.rows; r += group) {
        const int64_t n_rows = min64(group, t.rows - r);
        constexpr int64_t most = kSide;  // blocks in a band, of either height: group * (kSide / group)
        uint32_t amax_bits[most], col_amax[kSide];
        float scales[most], inverse[most], col_scales[kSide];
        TE_SIMD_CALL(amax_both)(part(x, t.row + r, t.col), n_rows, t.cols, group, amax_bits, col_amax);
        note(t, TE_SIMD_CALL(scales_from_amax)(amax_bits, n_rows * groups, fp8_max(format), pow2, scales, inverse));
        TE_SIMD_CALL(scales_from_amax)(col_amax, t.cols, fp8_max(format), pow2, col_scales, inverse_t + r / group * t.cols);
        for (int64_t i = 0; i < n_rows; ++i) write_scales((t.row + r + i) * across + t.col / group, inverse + i * groups, groups);
        encode_both(t, r, n_rows, scales, groups, group, col_scales, tile_amax[t.index] < kInfBits, next_band(t, r, group));
      }
      count(t);
      // Column by column, so that memory is written in runs.
      if (scale_byte_t != nullptr) {
        uint8_t bytes[kSide / kMxBlock * kSide];
        for (int64_t i = 0; i < bands * t.cols; ++i) bytes[i] = e8m0_encode(inverse_t[i]);
        TE_SIMD_CALL(transpose_bytes)(bytes, t.cols, bands, t.cols, scale_byte_t + t.col * down + t.row / group, down);
      } else {
        for (int64_t c = 0; c < t.cols; ++c) {
          for (int64_t b = 0; b < bands; ++b) scale_inv_t[(t.col + c) * down + t.row / group + b] = inverse_t[b * t.cols + c];
        }
      }
      write_transposed(t);
    });
  }

  // A scale per 128 x 128, the same for the transposed copy.
  void run_square_blocks() {
    const Cut cut = square_cut(rows, cols);
    begin_statistics(cut);
    const int64_t across = ceil_div(cols, kBlock), down = ceil_div(rows, kBlock);
    cut.for_each([&](const Tile& t) {
      const int64_t groups = ceil_div(t.cols, kBlock);
      for (int64_t r = 0; r < t.rows; r += kBlock) {
        const int64_t n_rows = min64(kBlock, t.rows - r);
        constexpr int64_t most = kSide / kBlock;
        uint32_t row_amax[kBlock * most], amax_bits[most] = {};
        float scales[most], inverse[most];
        TE_SIMD_CALL(amax_rows)(part(x, t.row + r, t.col), n_rows, t.cols, kBlock, row_amax);
        for (int64_t i = 0; i < n_rows; ++i) {
          for (int64_t g = 0; g < groups; ++g) {
            const uint32_t v = row_amax[i * groups + g];
            amax_bits[g] = v > amax_bits[g] ? v : amax_bits[g];
          }
        }
        note(t, TE_SIMD_CALL(scales_from_amax)(amax_bits, groups, fp8_max(format), pow2, scales, inverse));
        const int64_t block_row = (t.row + r) / kBlock, block_col = t.col / kBlock;
        write_scales(block_row * across + block_col, inverse, groups);
        const bool clean = tile_amax[t.index] < kInfBits;
        if (transposed) {
          write_scales_t(block_col * down + block_row, down, inverse, groups);
          encode_keeping(t, r, n_rows, scales, 0, kBlock, clean, next_band(t, r, kBlock));
        } else {
          encode(t.row + r, t.col, n_rows, t.cols, scales, 0, kBlock, clean, next_band(t, r, kBlock));
        }
      }
      count(t);
      if (transposed) write_transposed(t);
    });
  }
};

// Results too large for the last-level cache together with x are written past it: a line that is written whole need not be read. The
// system's word for that cache's size is no help: it may count caches of other cores.
bool larger_than_cache(int64_t bytes) { return bytes > int64_t(32) << 20; }

void check_input(const TensorView& x, const TensorView& stats) {
  check_device(x, "x", kDLCPU);
  check_dtype(x, "x", {DType::f32, DType::bf16, DType::f16});
  check_rank(x, "x", 2, "[R, C]");
  check_inner_contiguous(x, "x");
  check_device(stats, "stats", kDLCPU);
  check_dtype(stats, "stats", {DType::f32});
  check_shape(stats, "stats", {2}, "amax and the number of non-finite values");
  check_contiguous(stats, "stats");
}

void run(TensorView x, const TensorView* scale, TensorView data_out, const TensorView* scale_inv, const TensorView* data_t,
         const TensorView* scale_inv_t, TensorView stats, int64_t granularity, int64_t format, int64_t pow2) {
  check_granularity(granularity);
  check_format(format);
  TE_CHECK(pow2 == 0 || pow2 == 1, "pow2 is " << pow2 << "; expected 0 or 1");
  check_input(x, stats);
  const int64_t rows = x.size(0), cols = x.size(1);
  check_fp8(data_out, "data", format, rows, cols, "the shape of x");
  check_scale_inv(*scale_inv, "scale_inv", granularity, rows, cols);
  if (data_t != nullptr) check_fp8(*data_t, "data_t", format, cols, rows, "the shape of x, transposed");
  if (scale_inv_t != nullptr) check_scale_inv(*scale_inv_t, "scale_inv_t", granularity, cols, rows);
  const float* given = nullptr;
  if (scale != nullptr) {
    check_device(*scale, "scale", kDLCPU);
    check_dtype(*scale, "scale", {DType::f32});
    check_shape(*scale, "scale", {1}, "one scale for the tensor");
    given = data<float>(*scale);
    // A NaN passes: it comes from a NaN in the amax history and must reach the result.
    TE_CHECK(std::isnan(*given) || (*given > 0 && *given <= kFltMax), "scale is " << *given << "; expected a finite value above 0");
  }

  Quantize q{matrix_of(x), rows, cols, format, pow2 == 1 || granularity == kMx, data_t != nullptr, data<uint8_t>(data_out)};
  if (data_t != nullptr) q.data_t = data<uint8_t>(*data_t);
  if (granularity == kMx) {
    q.scale_byte = data<uint8_t>(*scale_inv);
    if (scale_inv_t != nullptr) q.scale_byte_t = data<uint8_t>(*scale_inv_t);
  } else {
    q.scale_inv = data<float>(*scale_inv);
    if (scale_inv_t != nullptr) q.scale_inv_t = data<float>(*scale_inv_t);
  }
  q.stream = larger_than_cache(rows * cols * ((q.x.dtype == kF32 ? 4 : 2) + (q.transposed ? 2 : 1)));
  switch (granularity) {
    case kTensor: q.run_tensor(given); break;
    case kRow: q.run_rows(); break;
    case kBlock1x128: q.run_row_blocks(kBlock); break;
    case kBlock128x128: q.run_square_blocks(); break;
    default: q.run_row_blocks(kMxBlock); break;
  }
  q.write_stats(data<float>(stats));
}

}  // namespace

// x[R, C] f32|bf16|f16, rows strided -> data[R, C], scale_inv (shape by granularity), stats[2] = (amax, number of non-finite values)
void quantize(TensorView x, TensorView data_out, TensorView scale_inv, TensorView stats, int64_t granularity, int64_t format,
              int64_t pow2) {
  run(x, nullptr, data_out, &scale_inv, nullptr, nullptr, stats, granularity, format, pow2);
}

// quantize, and data_t[C, R] with scale_inv_t: the same for x transposed, from the same reading of x.
void quantize_transpose(TensorView x, TensorView data_out, TensorView scale_inv, TensorView data_t, TensorView scale_inv_t,
                        TensorView stats, int64_t granularity, int64_t format, int64_t pow2) {
  run(x, nullptr, data_out, &scale_inv, &data_t, &scale_inv_t, stats, granularity, format, pow2);
}

// Delayed scaling: the scale[1] is given; scale_inv[1] = 1 / scale and the statistics are written.
void quantize_with_scale(TensorView x, TensorView scale, TensorView data_out, TensorView scale_inv, TensorView stats, int64_t format) {
  run(x, &scale, data_out, &scale_inv, nullptr, nullptr, stats, kTensor, format, 0);
}

void quantize_with_scale_transpose(TensorView x, TensorView scale, TensorView data_out, TensorView data_t, TensorView scale_inv,
                                   TensorView stats, int64_t format) {
  run(x, &scale, data_out, &scale_inv, &data_t, nullptr, stats, kTensor, format, 0);
}

// data[R, C] FP8, scale_inv (shape by granularity) -> y[R, C] f32|bf16 = data * scale_inv, one FP32 multiplication
void dequantize(TensorView data_in, TensorView scale_inv, TensorView y, int64_t granularity, int64_t format) {
  check_granularity(granularity);
  check_format(format);
  check_rank(data_in, "data", 2, "[R, C]");
  const int64_t rows = data_in.size(0), cols = data_in.size(1);
  check_fp8(data_in, "data", format, rows, cols, "[R, C]");
  check_scale_inv(scale_inv, "scale_inv", granularity, rows, cols);
  check_device(y, "y", kDLCPU);
  check_dtype(y, "y", {DType::f32, DType::bf16});
  check_shape(y, "y", {rows, cols}, "the shape of data");
  check_contiguous(y, "y");
  if (rows == 0 || cols == 0) return;

  const int64_t group = granularity == kMx ? kMxBlock : granularity == kTensor || granularity == kRow ? cols : kBlock;
  const int64_t groups = ceil_div(cols, group);
  const int64_t size = dtype_of(y) == DType::f32 ? 4 : 2;
  const int64_t band = ceil_div(kTaskElements, cols);
  parallel_for(ceil_div(rows, band), [&](int64_t task) {
    std::vector<float> decoded(granularity == kMx ? groups : 0);
    for (int64_t r = task * band; r < min64(rows, (task + 1) * band); ++r) {
      const float* scales;
      if (granularity == kMx) {
        for (int64_t g = 0; g < groups; ++g) decoded[g] = e8m0_decode(data<uint8_t>(scale_inv)[r * groups + g]);
        scales = decoded.data();
      } else {
        const int64_t row = granularity == kTensor ? 0 : granularity == kBlock128x128 ? r / kBlock : r;
        scales = data<float>(scale_inv) + row * groups;
      }
      TE_SIMD_CALL(decode_row)(data<uint8_t>(data_in) + r * cols, cols, scales, group, format, data<char>(y) + r * cols * size,
                               size == 4 ? kF32 : kBf16);
    }
  });
}

TE_EXPORT(quantize);
TE_EXPORT(quantize_transpose);
TE_EXPORT(quantize_with_scale);
TE_EXPORT(quantize_with_scale_transpose);
TE_EXPORT(dequantize);

}  // namespace te
