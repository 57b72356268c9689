// The kernels of FP8 attention (attention_fp8.h). Tiles are laid out as in the other attention kernels.
#include "attention_fp8.h"

#include "attention_chunk.h"
#include "attention_gradient.h"
#include "attention_tile.h"
#include "convert.h"
#include "scaling.h"

namespace te {
namespace TE_SIMD {
namespace {

template <int Code>
inline void decode_span(const uint8_t* from, int64_t count, float scale_inv, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = fp8_decode<Code>(from[i]) * scale_inv;
}

inline void decode_values(int64_t format, const uint8_t* from, int64_t count, float scale_inv, float* to) {
  if (format == kE4M3) return decode_span<kE4M3>(from, count, scale_inv, to);
  if (format == kE5M2) return decode_span<kE5M2>(from, count, scale_inv, to);
  if (format == kE4M3Fnuz) return decode_span<kE4M3Fnuz>(from, count, scale_inv, to);
  return decode_span<kE5M2Fnuz>(from, count, scale_inv, to);
}

template <int Code>
inline void encode_span(const float* from, int64_t count, float scale, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = uint8_t(fp8_encode<Code>(from[i] * scale));
}

inline void encode_values(int64_t format, const float* from, int64_t count, float scale, uint8_t* to) {
  if (format == kE4M3) return encode_span<kE4M3>(from, count, scale, to);
  if (format == kE5M2) return encode_span<kE5M2>(from, count, scale, to);
  if (format == kE4M3Fnuz) return encode_span<kE4M3Fnuz>(from, count, scale, to);
  return encode_span<kE5M2Fnuz>(from, count, scale, to);
}

template <int Code>
inline void round_span(float* x, int64_t count, float scale, float scale_inv) {
  for (int64_t i = 0; i < count; ++i) x[i] = fp8_decode<Code>(fp8_encode<Code>(x[i] * scale)) * scale_inv;
}

// x becomes what is left of it after quantisation: decode(encode(x * scale)) * scale_inv.
inline void round_values(int64_t format, float* x, int64_t count, float scale, float scale_inv) {
  if (format == kE4M3) return round_span<kE4M3>(x, count, scale, scale_inv);
  if (format == kE5M2) return round_span<kE5M2>(x, count, scale, scale_inv);
  if (format == kE4M3Fnuz) return round_span<kE4M3Fnuz>(x, count, scale, scale_inv);
  return round_span<kE5M2Fnuz>(x, count, scale, scale_inv);
}

inline uint32_t amax_of(const float* x, int64_t count, uint32_t amax) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t u = float_bits(x[i]) & 0x7fffffffu;
    amax = u > amax ? u : amax;
  }
  return amax;
}

// Rows first .. first + count - 1 of one head as float[count, padded_dim].
inline void read_fp8_rows(const AttentionFp8Tensor& t, int64_t format, int64_t first, int64_t count, int64_t head, int64_t dim,
                          int64_t padded_dim, float* to) {
  for (int64_t r = 0; r < count; ++r) {
    const float scale_inv = t.scale_inv[(first + r) * t.scale_row + head * t.scale_head];
    decode_values(format, t.data + (first + r) * t.row_stride + head * t.head_stride, dim, scale_inv, to + r * padded_dim);
    fill(to + r * padded_dim + dim, padded_dim - dim, 0.0f);
  }
}

// x times the orthogonal Hadamard matrix of its size, a power of two; it is its own inverse.
inline void hadamard(float* x, int64_t dim) {
  for (int64_t half = 1; half < dim; half *= 2) {
    for (int64_t base = 0; base < dim; base += 2 * half) {
      for (int64_t i = base; i < base + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const float norm = 1.0f / __builtin_sqrtf(float(dim));
  for (int64_t i = 0; i < dim; ++i) x[i] *= norm;
}

// The first look at a tile: raises chunk.high to the largest score.
void raise_high(const AttentionSegment& segment, const Chunk& chunk, KeyRange keys, float scale_log2, const float* scores) {
  const int64_t count = keys.end - keys.begin;
  for (int64_t lane = 0; lane < round_up(chunk.rows, kLanes); lane += kLanes) {
    const LaneKeys seen = lane_keys(segment, chunk.row, chunk.rows, lane, keys);
    Vec high = load(chunk.high + lane);
    for (int64_t j = 0; j < count; ++j) {
      Vec s = load(scores + j * kQueryChunk + lane) * scale_log2;
      s = seen.at(j) ? s : splat(-kInfinity);
      high = s > high ? s : high;
    }
    store(chunk.high + lane, high);
  }
}

// The second look: scores becomes exp2(score - high), 0 where masked, and is added to chunk.sum.
void weigh(const AttentionSegment& segment, const Chunk& chunk, KeyRange keys, float scale_log2, float* scores) {
  const int64_t count = keys.end - keys.begin;
  for (int64_t lane = 0; lane < round_up(chunk.rows, kLanes); lane += kLanes) {
    const LaneKeys seen = lane_keys(segment, chunk.row, chunk.rows, lane, keys);
    const Vec high = load(chunk.high + lane);
    const Vec finite_high = high == -kInfinity ? splat(0.0f) : high;
    Vec sum = load(chunk.sum + lane);
    for (int64_t j = 0; j < count; ++j) {
      const Vec s = load(scores + j * kQueryChunk + lane) * scale_log2;
      const Vec p = exp2((seen.at(j) ? s : splat(-kInfinity)) - finite_high);
      store(scores + j * kQueryChunk + lane, p);
      sum += p;
    }
    store(chunk.sum + lane, sum);
  }
}

}  // namespace

int64_t attention_fp8_forward_scratch(const AttentionFp8Call& call, int64_t chunks) {
  const int64_t padded_dim = attention_padded_dim(call.base.dim);
  return 2 * kForwardKeys * padded_dim + kForwardKeys * kQueryChunk + kQueryChunk * padded_dim +
         chunks * chunk_floats(padded_dim);
}

void attention_fp8_forward_item(const AttentionFp8Call& fp8, const AttentionSegment& segment, const AttentionForwardItem& item,
                                float* scratch) {
  const AttentionCall& call = fp8.base;
  const int64_t dim = call.dim, padded_dim = attention_padded_dim(dim);
  const int64_t kv_head = item.head_begin / (call.heads / call.kv_heads);
  const float scale_log2 = call.scale * kLog2e;
  float* k = scratch;
  float* v = k + kForwardKeys * padded_dim;
  float* scores = v + kForwardKeys * padded_dim;
  float* rows = scores + kForwardKeys * kQueryChunk;
  float* chunks = rows + kQueryChunk * padded_dim;
  const auto chunk_at = [&](int64_t number) {
    return chunk_of(item, padded_dim, number, chunks + number * chunk_floats(padded_dim));
  };
  const int64_t count = chunk_count(item);
  for (int64_t n = 0; n < count; ++n) {
    const Chunk c = chunk_at(n);
    read_fp8_rows(fp8.q, fp8.forward_format, segment.q_start + c.row, c.rows, c.head, dim, padded_dim, rows);
    begin_chunk(c, padded_dim, rows);
  }
  const KeyRange all = keys_of(segment, item.row_begin, item.row_end - item.row_begin);
  // P is rounded against the maximum of its whole row, which takes a pass over the keys before the one that sums.
  for (int pass = 0; pass < 2; ++pass) {
    const bool summing = pass == 1;
    for (int64_t block = all.begin / kForwardKeys * kForwardKeys; block < all.end; block += kForwardKeys) {
      const int64_t begin = larger(block, all.begin), end = smaller(block + kForwardKeys, all.end);
      read_fp8_rows(fp8.k, fp8.forward_format, segment.k_start + begin, end - begin, kv_head, dim, padded_dim, k);
      if (summing) read_fp8_rows(fp8.v, fp8.forward_format, segment.k_start + begin, end - begin, kv_head, dim, padded_dim, v);
      for (int64_t n = 0; n < count; ++n) {
        const Chunk c = chunk_at(n);
        const KeyRange seen = keys_of(segment, c.row, c.rows);
        const KeyRange keys = {larger(begin, seen.begin), smaller(end, seen.end)};
        if (keys.begin >= keys.end) continue;
        const int64_t width = round_up(c.rows, kLanes), tile = keys.end - keys.begin;
        const int64_t offset = (keys.begin - begin) * padded_dim;
        multiply<Start::zero>(tile, width, dim, k + offset, padded_dim, 1, c.q, kQueryChunk, scores, kQueryChunk);
        if (!summing) {
          raise_high(segment, c, keys, scale_log2, scores);
          continue;
        }
        weigh(segment, c, keys, scale_log2, scores);
        for (int64_t j = 0; j < tile; ++j) {
          round_values(fp8.forward_format, scores + j * kQueryChunk, width, fp8.p_scale, 1.0f / fp8.p_scale);
        }
        if (keys.begin == seen.begin) {
          multiply<Start::zero>(dim, width, tile, v + offset, 1, padded_dim, scores, kQueryChunk, c.out, kQueryChunk);
        } else {
          multiply<Start::add>(dim, width, tile, v + offset, 1, padded_dim, scores, kQueryChunk, c.out, kQueryChunk);
        }
      }
    }
  }
  for (int64_t n = 0; n < count; ++n) finish_chunk(call, segment, chunk_at(n), padded_dim, rows);
}

int64_t attention_fp8_backward_scratch(const AttentionFp8Call& call) {
  const int64_t padded_dim = attention_padded_dim(call.base.dim);
  return 4 * kFp8Tile * padded_dim + 2 * kFp8Tile * padded_dim + 3 * kQueryChunk * padded_dim + 2 * kFp8Tile * kFp8Tile +
         2 * kQueryChunk;
}

void attention_fp8_backward_item(const AttentionFp8Call& fp8, const AttentionSegment& segment,
                                 const AttentionBackwardItem& item, void (*wait)(const int64_t* progress, int64_t at_least),
                                 float* scratch) {
  const AttentionCall& call = fp8.base;
  const int64_t dim = call.dim, padded_dim = attention_padded_dim(dim);
  const int64_t group = call.heads / call.kv_heads, keys_count = item.key_end - item.key_begin;
  const float scale_log2 = call.scale * kLog2e;
  float* k = scratch;
  float* v = k + kFp8Tile * padded_dim;
  float* dk = v + kFp8Tile * padded_dim;
  float* dv = dk + kFp8Tile * padded_dim;
  float* q = dv + kFp8Tile * padded_dim;      // [tile of queries, dim]
  float* dout = q + kFp8Tile * padded_dim;    // [tile of queries, dim]
  float* dq = dout + kFp8Tile * padded_dim;   // [query, dim]
  float* dq_t = dq + kQueryChunk * padded_dim;
  float* turned = dq_t + kQueryChunk * padded_dim;  // q or dout of a chunk as [dim, query]
  float* p = turned + kQueryChunk * padded_dim;     // [chunk, key, query]
  float* ds = p + kFp8Tile * kFp8Tile;              // [chunk, key, query]
  float* lse = ds + kFp8Tile * kFp8Tile;
  float* delta = lse + kQueryChunk;

  fill(dk, keys_count * padded_dim, 0.0f);
  fill(dv, keys_count * padded_dim, 0.0f);
  read_fp8_rows(fp8.k, fp8.forward_format, segment.k_start + item.key_begin, keys_count, item.kv_head, dim, padded_dim, k);
  read_fp8_rows(fp8.v, fp8.forward_format, segment.k_start + item.key_begin, keys_count, item.kv_head, dim, padded_dim, v);
  for (int64_t tile = 0; tile < segment.q_len; tile += kFp8Tile) {
    const int64_t tile_rows = smaller(kFp8Tile, segment.q_len - tile);
    const KeyRange seen = keys_of(segment, tile, tile_rows);
    const KeyRange keys = {larger(item.key_begin, seen.begin), smaller(item.key_end, seen.end)};
    if (keys.begin >= keys.end) continue;
    const int64_t count = keys.end - keys.begin, offset = (keys.begin - item.key_begin) * padded_dim;
    const bool first = seen.begin >= item.key_begin;
    for (int64_t head = item.kv_head * group; head < (item.kv_head + 1) * group; ++head) {
      const int64_t row0 = segment.q_start + tile;
      read_fp8_rows(fp8.q, fp8.forward_format, row0, tile_rows, head, dim, padded_dim, q);
      read_fp8_rows(fp8.dout, fp8.gradient_format, row0, tile_rows, head, dim, padded_dim, dout);
      fill(q + tile_rows * padded_dim, (kFp8Tile - tile_rows) * padded_dim, 0.0f);
      fill(dout + tile_rows * padded_dim, (kFp8Tile - tile_rows) * padded_dim, 0.0f);
      uint32_t amax = 0;
      for (int64_t row = 0; row < tile_rows; row += kQueryChunk) {
        const int64_t rows = smaller(kQueryChunk, tile_rows - row), at = head * call.rows_q + row0 + row;
        fill(lse, kQueryChunk, 0.0f);
        fill(delta, kQueryChunk, 0.0f);
        for (int64_t i = 0; i < rows; ++i) {
          lse[i] = call.lse[at + i];
          delta[i] = call.delta[at + i];
        }
        float* p_chunk = p + row * kFp8Tile;
        float* ds_chunk = ds + row * kFp8Tile;
        transpose(kQueryChunk, padded_dim, q + row * padded_dim, padded_dim, turned, kQueryChunk);
        multiply<Start::zero>(count, kQueryChunk, dim, k + offset, padded_dim, 1, turned, kQueryChunk, p_chunk, kQueryChunk);
        transpose(kQueryChunk, padded_dim, dout + row * padded_dim, padded_dim, turned, kQueryChunk);
        multiply<Start::zero>(count, kQueryChunk, dim, v + offset, padded_dim, 1, turned, kQueryChunk, ds_chunk, kQueryChunk);
        gradient_tile(segment, tile + row, rows, keys, scale_log2, lse, delta, p_chunk, ds_chunk);
        for (int64_t j = 0; j < count; ++j) amax = amax_of(ds_chunk + j * kQueryChunk, rows, amax);
      }
      const Scale ds_scale = scale_from_amax(amax, fp8_max(fp8.gradient_format), false);
      if (item.previous != nullptr && head == item.kv_head * group) wait(item.previous, tile + 1);
      for (int64_t row = 0; row < tile_rows; row += kQueryChunk) {
        const int64_t rows = smaller(kQueryChunk, tile_rows - row);
        float* p_chunk = p + row * kFp8Tile;
        float* ds_chunk = ds + row * kFp8Tile;
        for (int64_t j = 0; j < count; ++j) {
          round_values(fp8.forward_format, p_chunk + j * kQueryChunk, rows, fp8.p_scale, 1.0f / fp8.p_scale);
          round_values(fp8.gradient_format, ds_chunk + j * kQueryChunk, rows, ds_scale.scale, ds_scale.scale_inv);
        }
        multiply<Start::add>(count, padded_dim, rows, p_chunk, kQueryChunk, 1, dout + row * padded_dim, padded_dim, dv + offset,
                             padded_dim);
        multiply<Start::add>(count, padded_dim, rows, ds_chunk, kQueryChunk, 1, q + row * padded_dim, padded_dim, dk + offset,
                             padded_dim);
        const int64_t width = round_up(rows, kLanes);
        multiply<Start::zero>(dim, width, count, k + offset, 1, padded_dim, ds_chunk, kQueryChunk, dq_t, kQueryChunk);
        transpose(padded_dim, width, dq_t, kQueryChunk, dq, padded_dim);
        accumulate_dq(call, segment, head, tile + row, rows, padded_dim, first, dq);
      }
    }
    __atomic_store_n(item.progress, tile + 1, __ATOMIC_RELEASE);
  }
  if (fp8.rotated) {
    for (int64_t j = 0; j < keys_count; ++j) hadamard(dk + j * padded_dim, dim);
  }
  const int64_t first_row = segment.k_start + item.key_begin;
  write_rows(call.dk, call.dtype, first_row, keys_count, item.kv_head, dim, padded_dim, dk, call.scale);
  write_rows(call.dv, call.dtype, first_row, keys_count, item.kv_head, dim, padded_dim, dv, 1.0f);
}

void attention_fp8_delta(const AttentionFp8Call& fp8, const AttentionSegment& segment, int64_t row_begin, int64_t row_end,
                         float* scratch) {
  const AttentionCall& call = fp8.base;
  const int64_t padded_dim = attention_padded_dim(call.dim);
  float* a = scratch;
  float* b = a + padded_dim;
  for (int64_t row = segment.q_start + row_begin; row < segment.q_start + row_end; ++row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      read_fp8_rows(fp8.dout, fp8.gradient_format, row, 1, head, call.dim, padded_dim, a);
      read_row(address(call.out, call.dtype, row, head), call.dtype, call.dim, padded_dim, b);
      call.delta[head * call.rows_q + row] = dot(a, b, padded_dim);
    }
  }
}

void attention_fp8_dq_out(const AttentionFp8Call& fp8, const AttentionSegment& segment, int64_t row_begin, int64_t row_end,
                          float* scratch) {
  const AttentionCall& call = fp8.base;
  const int64_t padded_dim = attention_padded_dim(call.dim);
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      read_dq(call, segment, head, row, padded_dim, scratch);
      if (fp8.rotated) hadamard(scratch, call.dim);
      write_rows(call.dq, call.dtype, segment.q_start + row, 1, head, call.dim, padded_dim, scratch, call.scale);
    }
  }
}

namespace {

// One row of one head, centred and rotated as the call asks.
inline void prepare_row(const AttentionQuantizeCall& call, int64_t segment, int64_t row, int64_t head, float* to) {
  read_row(address(call.x, call.dtype, row, head), call.dtype, call.dim, call.dim, to);
  if (call.means != nullptr) {
    const double* mean = call.means + (segment * call.heads + head) * call.dim;
    for (int64_t c = 0; c < call.dim; ++c) to[c] = float(double(to[c]) - mean[c]);
  }
  if (call.rotate) hadamard(to, call.dim);
}

}  // namespace

void attention_column_sums(const AttentionQuantizeCall& call, int64_t row_begin, int64_t row_end, double* sums, float* scratch) {
  for (int64_t i = 0; i < call.heads * call.dim; ++i) sums[i] = 0;
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      read_row(address(call.x, call.dtype, row, head), call.dtype, call.dim, call.dim, scratch);
      for (int64_t c = 0; c < call.dim; ++c) sums[head * call.dim + c] += double(scratch[c]);
    }
  }
}

int64_t attention_quantize_amax(const AttentionQuantizeCall& call, int64_t segment, int64_t row_begin, int64_t row_end,
                                uint32_t* amax, float* scratch) {
  int64_t nonfinite = 0;
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      prepare_row(call, segment, row, head, scratch);
      amax[row * call.heads + head] = amax_of(scratch, call.dim, 0);
      for (int64_t c = 0; c < call.dim; ++c) nonfinite += (float_bits(scratch[c]) & kInfBits) == kInfBits;
    }
  }
  return nonfinite;
}

void attention_quantize_rows(const AttentionQuantizeCall& call, int64_t segment, int64_t row_begin, int64_t row_end,
                             float* scratch) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      prepare_row(call, segment, row, head, scratch);
      encode_values(call.format, scratch, call.dim, call.scale[row * call.scale_row + head * call.scale_head],
                    call.data + (row * call.heads + head) * call.dim);
    }
  }
}

}  // namespace TE_SIMD
}  // namespace te
