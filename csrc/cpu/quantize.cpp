// Quantise and dequantise: checks, the scales, and how the work is cut into tasks. The numbers are defined at the head of
// te_plugin/numerics.py; the inner loops are in quantize.simd.cpp.
//
// A matrix is cut into tiles of 128 rows by some columns; a tile is one task. Kinds whose scale needs more than one tile (tensor,
// row) read x twice: first every tile's amax, then the encoding. Block kinds, and delayed scaling, read it once.
#include <cmath>
#include <vector>

#include "parallel.h"
#include "quantize_kernels.h"
#include "scaling.h"
#include "tensor.h"

namespace te {
namespace {

constexpr int64_t kBandRows = kBlock;
constexpr int64_t kTaskElements = 128 * 1024;
constexpr int64_t kSubtile = kBlock;  // columns handled at once inside a task, so that what is transposed is still in the L1 cache

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

struct Quantize {
  Matrix x;
  int64_t rows, cols, format;
  bool pow2;
  uint8_t* data;
  uint8_t* data_t = nullptr;  // absent: no transposed copy
  float* scale_inv = nullptr;
  float* scale_inv_t = nullptr;
  uint8_t* scale_byte = nullptr;  // instead of scale_inv, granularity mx
  uint8_t* scale_byte_t = nullptr;

  int64_t bands = 0, chunks = 0, width = 0;  // tiles: 128 rows by `width` columns
  std::vector<uint32_t> tile_amax = {};
  std::vector<int64_t> tile_nonfinite = {};

  struct Tile {
    int64_t index, row, col, rows, cols;
  };

  void cut() {
    bands = ceil_div(rows, kBandRows);
    const int64_t height = min64(rows, kBandRows);
    width = rows == 0 ? kBlock : ceil_div(ceil_div(kTaskElements, height), kBlock) * kBlock;
    chunks = ceil_div(cols, width);
    tile_amax.assign(bands * chunks, 0);
    tile_nonfinite.assign(bands * chunks, 0);
  }

  template <typename F>
  void for_each_tile(const F& body) const {
    parallel_for(bands * chunks, [&](int64_t i) {
      const int64_t row = i / chunks * kBandRows, col = i % chunks * width;
      body(Tile{i, row, col, min64(kBandRows, rows - row), min64(width, cols - col)});
    });
  }

  // body(column inside x, columns) over the subtiles of a tile
  template <typename F>
  static void for_each_subtile(const Tile& t, const F& body) {
    for (int64_t c = t.col; c < t.col + t.cols; c += kSubtile) body(c, min64(kSubtile, t.col + t.cols - c));
  }

  void note(const Tile& t, uint32_t amax_bits) {
    if (amax_bits > tile_amax[t.index]) tile_amax[t.index] = amax_bits;
  }
  // Counting is rare work: an amax below infinity says that there is nothing to count.
  void count(const Tile& t) {
    if (tile_amax[t.index] >= kInfBits) tile_nonfinite[t.index] = TE_SIMD_CALL(count_nonfinite)(part(x, t.row, t.col), t.rows, t.cols);
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

  // The row-major copy of a tile with scales[r * scale_ld + c / group] (r, c from the tile's corner), and, when the transposed copy
  // has the same scales, that one too.
  void encode_tile(const Tile& t, const float* scales, int64_t scale_ld, int64_t group, bool clean, bool transpose) const {
    if (!transpose) {
      TE_SIMD_CALL(encode_rows)(part(x, t.row, t.col), t.rows, t.cols, scales, scale_ld, group, format, clean, data + t.row * cols + t.col, cols);
      return;
    }
    for_each_subtile(t, [&](int64_t c, int64_t n) {
      uint8_t* out = data + t.row * cols + c;
      TE_SIMD_CALL(encode_rows)(part(x, t.row, c), t.rows, n, scales + (c - t.col) / group, scale_ld, group, format, clean, out, cols);
      TE_SIMD_CALL(transpose_bytes)(out, cols, t.rows, n, data_t + c * rows + t.row, rows);
    });
  }

  // The transposed copy of a subtile with a scale per column for every `group` rows.
  void encode_transposed(const Tile& t, int64_t c, int64_t n, const float* scales, int64_t scale_ld, int64_t group, bool clean) const {
    uint8_t tile[kBandRows * kSubtile];
    TE_SIMD_CALL(encode_cols)(part(x, t.row, c), t.rows, n, scales, scale_ld, group, format, clean, tile, kSubtile);
    TE_SIMD_CALL(transpose_bytes)(tile, kSubtile, t.rows, n, data_t + c * rows + t.row, rows);
  }

  // One scale for the whole tensor, known beforehand (delayed) or not.
  void run_tensor(const float* given_scale) {
    auto amax_of_tile = [&](const Tile& t) {
      uint32_t row_amax[kBandRows];
      TE_SIMD_CALL(amax_rows)(part(x, t.row, t.col), t.rows, t.cols, t.cols, row_amax);
      for (int64_t r = 0; r < t.rows; ++r) note(t, row_amax[r]);
      count(t);
    };
    Scale s;
    if (given_scale != nullptr) {
      s = {*given_scale, 1.0f / *given_scale};
      for_each_tile([&](const Tile& t) {
        amax_of_tile(t);
        const bool clean = tile_amax[t.index] < kInfBits && bits_float(tile_amax[t.index]) * s.scale <= fp8_max(format);
        encode_tile(t, &s.scale, 0, t.cols, clean, data_t != nullptr);
      });
    } else {
      for_each_tile(amax_of_tile);
      s = scale_of(amax());
      const bool clean = amax() < kInfBits;
      for_each_tile([&](const Tile& t) { encode_tile(t, &s.scale, 0, t.cols, clean, data_t != nullptr); });
    }
    write_scales(0, &s.scale_inv, 1);
    if (scale_inv_t != nullptr) write_scales_t(0, 1, &s.scale_inv, 1);
  }

  // A scale per row; the transposed copy has a scale per column.
  void run_rows() {
    // Asked by the scales: with no rows data_t is empty, so its pointer may be null, while every column still has a scale.
    const bool transposed = scale_inv_t != nullptr;
    std::vector<uint32_t> row_amax(chunks * rows), col_amax(transposed ? bands * cols : 0);
    for_each_tile([&](const Tile& t) {
      uint32_t* out = row_amax.data() + t.index % chunks * rows + t.row;
      TE_SIMD_CALL(amax_rows)(part(x, t.row, t.col), t.rows, t.cols, t.cols, out);
      for (int64_t r = 0; r < t.rows; ++r) note(t, out[r]);
      if (transposed) TE_SIMD_CALL(amax_cols)(part(x, t.row, t.col), t.rows, t.cols, col_amax.data() + t.index / chunks * cols + t.col);
      count(t);
    });
    // The parts of a row or column are in the first `n` entries afterwards.
    auto reduce = [&](std::vector<uint32_t>& parts, int64_t count, int64_t n, float* inverse) {
      std::vector<float> scales(n);
      parts.resize(count > 0 ? count * n : n, 0);
      for (int64_t p = 1; p < count; ++p) {
        for (int64_t i = 0; i < n; ++i) parts[i] = parts[p * n + i] > parts[i] ? parts[p * n + i] : parts[i];
      }
      TE_SIMD_CALL(scales_from_amax)(parts.data(), n, fp8_max(format), pow2, scales.data(), inverse);
      return scales;
    };
    const std::vector<float> row_scale = reduce(row_amax, chunks, rows, scale_inv);
    std::vector<float> col_scale;
    if (data_t != nullptr) col_scale = reduce(col_amax, bands, cols, scale_inv_t);
    const bool clean = amax() < kInfBits;
    for_each_tile([&](const Tile& t) {
      encode_tile(t, row_scale.data() + t.row, 1, t.cols, clean, false);
      if (!transposed) return;
      for_each_subtile(t, [&](int64_t c, int64_t n) { encode_transposed(t, c, n, col_scale.data() + c, 0, kBandRows, clean); });
    });
  }

  // A scale per 1 x `group` (128, or 32 for mx); the transposed copy has scales of its own, along its own rows.
  void run_row_blocks(int64_t group) {
    const int64_t across = ceil_div(cols, group), down = ceil_div(rows, group);
    constexpr int64_t most = kBlock / kMxBlock;  // groups in the side of a subtile
    for_each_tile([&](const Tile& t) {
      for_each_subtile(t, [&](int64_t c, int64_t n) {
        uint32_t amax_bits[kBandRows * most];
        float scales[kBandRows * most], inverse[kBandRows * most];
        const int64_t groups = ceil_div(n, group);
        const Matrix m = part(x, t.row, c);
        TE_SIMD_CALL(amax_rows)(m, t.rows, n, group, amax_bits);
        note(t, TE_SIMD_CALL(scales_from_amax)(amax_bits, t.rows * groups, fp8_max(format), pow2, scales, inverse));
        for (int64_t r = 0; r < t.rows; ++r) write_scales((t.row + r) * across + c / group, inverse + r * groups, groups);
        const bool clean = tile_amax[t.index] < kInfBits;
        TE_SIMD_CALL(encode_rows)(m, t.rows, n, scales, groups, group, format, clean, data + t.row * cols + c, cols);
        if (data_t == nullptr) return;
        const int64_t tall = ceil_div(t.rows, group);
        for (int64_t g = 0; g < tall; ++g) {
          TE_SIMD_CALL(amax_cols)(part(x, t.row + g * group, c), min64(group, t.rows - g * group), n, amax_bits);
          TE_SIMD_CALL(scales_from_amax)(amax_bits, n, fp8_max(format), pow2, scales + g * kSubtile, inverse);
          write_scales_t(c * down + t.row / group + g, down, inverse, n);
        }
        encode_transposed(t, c, n, scales, kSubtile, group, clean);
      });
      count(t);
    });
  }

  // A scale per 128 x 128, the same for the transposed copy.
  void run_square_blocks() {
    const int64_t across = ceil_div(cols, kBlock), down = ceil_div(rows, kBlock);
    for_each_tile([&](const Tile& t) {
      for_each_subtile(t, [&](int64_t c, int64_t n) {
        uint32_t row_amax[kBandRows], best = 0;
        TE_SIMD_CALL(amax_rows)(part(x, t.row, c), t.rows, n, n, row_amax);
        for (int64_t r = 0; r < t.rows; ++r) best = row_amax[r] > best ? row_amax[r] : best;
        note(t, best);
        const Scale s = scale_of(best);
        write_scales(t.row / kBlock * across + c / kBlock, &s.scale_inv, 1);
        if (data_t != nullptr) write_scales_t(c / kBlock * down + t.row / kBlock, 1, &s.scale_inv, 1);
        encode_tile(Tile{t.index, t.row, c, t.rows, n}, &s.scale, 0, n, best < kInfBits, data_t != nullptr);
      });
      count(t);
    });
  }
};

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

  Quantize q{matrix_of(x), rows, cols, format, pow2 == 1 || granularity == kMx, data<uint8_t>(data_out)};
  if (data_t != nullptr) q.data_t = data<uint8_t>(*data_t);
  if (granularity == kMx) {
    q.scale_byte = data<uint8_t>(*scale_inv);
    if (scale_inv_t != nullptr) q.scale_byte_t = data<uint8_t>(*scale_inv_t);
  } else {
    q.scale_inv = data<float>(*scale_inv);
    if (scale_inv_t != nullptr) q.scale_inv_t = data<float>(*scale_inv_t);
  }
  q.cut();
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize, quantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_transpose, quantize_transpose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_with_scale, quantize_with_scale);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_with_scale_transpose, quantize_with_scale_transpose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize, dequantize);

}  // namespace te
