// A chunk of 32 queries of one head in the forward kernels, and how it begins and ends.
#pragma once

#include "attention_tile.h"

namespace te {
namespace TE_SIMD {
namespace {

// What a chunk of queries keeps between blocks of keys.
struct Chunk {
  float* q;     // [dim, kQueryChunk]
  float* out;   // [dim, kQueryChunk], not yet divided by sum
  float* high;  // [kQueryChunk], largest score so far, times log2(e)
  float* sum;   // [kQueryChunk]
  int64_t head, row, rows;
};

inline int64_t chunk_floats(int64_t padded_dim) { return 2 * padded_dim * kQueryChunk + 2 * kQueryChunk; }

inline int64_t row_chunks(const AttentionForwardItem& item) {
  return (item.row_end - item.row_begin + kQueryChunk - 1) / kQueryChunk;
}

inline int64_t chunk_count(const AttentionForwardItem& item) { return row_chunks(item) * (item.head_end - item.head_begin); }

// The numbered chunk of an item, in chunk_floats(padded_dim) floats of memory.
inline Chunk chunk_of(const AttentionForwardItem& item, int64_t padded_dim, int64_t number, float* memory) {
  Chunk c;
  c.q = memory;
  c.out = c.q + padded_dim * kQueryChunk;
  c.high = c.out + padded_dim * kQueryChunk;
  c.sum = c.high + kQueryChunk;
  c.head = item.head_begin + number / row_chunks(item);
  c.row = item.row_begin + number % row_chunks(item) * kQueryChunk;
  c.rows = smaller(kQueryChunk, item.row_end - c.row);
  return c;
}

// Takes q rows [chunk.rows, padded_dim]; `rows` has room for kQueryChunk of them.
inline void begin_chunk(const Chunk& chunk, int64_t padded_dim, float* rows) {
  const int64_t width = round_up(chunk.rows, kLanes);
  fill(rows + chunk.rows * padded_dim, (width - chunk.rows) * padded_dim, 0.0f);
  transpose(width, padded_dim, rows, padded_dim, chunk.q, kQueryChunk);
  fill(chunk.high, kQueryChunk, -kInfinity);
  fill(chunk.sum, kQueryChunk, 0.0f);
}

// Writes out and lse.
inline void finish_chunk(const AttentionCall& call, const AttentionSegment& segment, const Chunk& chunk, int64_t padded_dim,
                         float* rows) {
  const int64_t width = round_up(chunk.rows, kLanes);
  float* lse = call.lse + chunk.head * call.rows_q + segment.q_start + chunk.row;
  const KeyRange seen = keys_of(segment, chunk.row, chunk.rows);
  if (seen.begin >= seen.end) {
    fill(rows, chunk.rows * padded_dim, 0.0f);
    fill(lse, chunk.rows, -kInfinity);
  } else {
    for (int64_t lane = 0; lane < width; lane += kLanes) {
      const Vec sum = load(chunk.sum + lane);
      for (int64_t d = 0; d < call.dim; ++d) {
        float* out = chunk.out + d * kQueryChunk + lane;
        // A division, not a product with 1 / sum: the mean of equal weights is then the correctly rounded one.
        store(out, sum == 0.0f ? splat(0.0f) : load(out) / sum);
      }
    }
    transpose(padded_dim, width, chunk.out, kQueryChunk, rows, padded_dim);
    for (int64_t i = 0; i < chunk.rows; ++i) {
      lse[i] = chunk.sum[i] == 0.0f ? -kInfinity : (chunk.high[i] + __builtin_log2f(chunk.sum[i])) * kLn2;
    }
  }
  write_rows(call.out, call.dtype, segment.q_start + chunk.row, chunk.rows, chunk.head, call.dim, padded_dim, rows, 1.0f);
}

}  // namespace
}  // namespace TE_SIMD
}  // namespace te
