// Attention forward for one range of queries: softmax on the fly over blocks of keys.
//
// Tiles are held transposed, scores[key, query] and output[dim, query]: queries are vector lanes, so maxima and sums need no
// reduction across lanes, and K and V are read as scalars from rows as they lie in memory.
#include "attention_chunk.h"
#include "attention_tile.h"

namespace te {
namespace TE_SIMD {
namespace {

// Turns scores[keys, queries] into exp2(score - high) with masked ones 0, and updates high and sum. factor[query] is what earlier
// sums and outputs must be multiplied with.
void softmax_tile(const AttentionSegment& segment, Chunk& chunk, KeyRange keys, float scale_log2, float* scores,
                  float* factor) {
  const int64_t count = keys.end - keys.begin;
  const bool masked = !sees_all(segment, chunk.row, chunk.rows, keys);
  for (int64_t lane = 0; lane < round_up(chunk.rows, kLanes); lane += kLanes) {
    float* column = scores + lane;
    const Vec before = load(chunk.high + lane);
    Vec high = before;
    if (masked) {
      const LaneKeys seen = lane_keys(segment, chunk.row, chunk.rows, lane, keys);
      for (int64_t j = 0; j < count; ++j) {
        Vec s = load(column + j * kQueryChunk) * scale_log2;
        s = seen.at(j) ? s : splat(-kInfinity);
        store(column + j * kQueryChunk, s);
        high = s > high ? s : high;
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        const Vec s = load(column + j * kQueryChunk) * scale_log2;
        store(column + j * kQueryChunk, s);
        high = s > high ? s : high;
      }
    }
    // A query that has seen no key yet: any finite number serves, and every exp2(-inf - 0) is 0.
    const Vec finite_high = high == -kInfinity ? splat(0.0f) : high;
    const Vec rescale = exp2(before - finite_high);
    Vec sum = load(chunk.sum + lane) * rescale;
    for (int64_t j = 0; j < count; ++j) {
      const Vec p = exp2(load(column + j * kQueryChunk) - finite_high);
      store(column + j * kQueryChunk, p);
      sum += p;
    }
    store(factor + lane, rescale);
    store(chunk.high + lane, high);
    store(chunk.sum + lane, sum);
  }
}

}  // namespace

int64_t attention_forward_scratch(const AttentionCall& call, int64_t chunks) {
  const int64_t padded_dim = attention_padded_dim(call.dim);
  return 2 * kForwardKeys * padded_dim + kForwardKeys * kQueryChunk + kQueryChunk * padded_dim + kQueryChunk +
         chunks * chunk_floats(padded_dim);
}

void attention_forward_item(const AttentionCall& call, const AttentionSegment& segment, const AttentionForwardItem& item,
                            float* scratch) {
  const int64_t dim = call.dim, padded_dim = attention_padded_dim(dim);
  const int64_t kv_head = item.head_begin / (call.heads / call.kv_heads);
  const float scale_log2 = call.scale * kLog2e;
  float* k = scratch;
  float* v = k + kForwardKeys * padded_dim;
  float* scores = v + kForwardKeys * padded_dim;
  float* rows = scores + kForwardKeys * kQueryChunk;
  float* factor = rows + kQueryChunk * padded_dim;
  float* chunks = factor + kQueryChunk;
  const auto chunk_at = [&](int64_t number) {
    return chunk_of(item, padded_dim, number, chunks + number * chunk_floats(padded_dim));
  };
  const int64_t count = chunk_count(item);
  for (int64_t n = 0; n < count; ++n) {
    const Chunk c = chunk_at(n);
    read_rows(call.q, call.dtype, segment.q_start + c.row, c.rows, c.head, dim, padded_dim, rows);
    begin_chunk(c, padded_dim, rows);
  }

  const KeyRange all = keys_of(segment, item.row_begin, item.row_end - item.row_begin);
  const int64_t first_block = all.begin / kForwardKeys * kForwardKeys;
  for (int64_t block = first_block; block < all.end; block += kForwardKeys) {
    // Keys that no row of this item sees are not read.
    const int64_t begin = larger(block, all.begin), end = smaller(block + kForwardKeys, all.end);
    const int64_t skipped = (begin - block) * padded_dim;
    read_rows(call.k, call.dtype, segment.k_start + begin, end - begin, kv_head, dim, padded_dim, k + skipped);
    read_rows(call.v, call.dtype, segment.k_start + begin, end - begin, kv_head, dim, padded_dim, v + skipped);
    for (int64_t n = 0; n < count; ++n) {
      Chunk c = chunk_at(n);
      const KeyRange seen = keys_of(segment, c.row, c.rows);
      const KeyRange keys = {larger(begin, seen.begin), smaller(end, seen.end)};
      if (keys.begin >= keys.end) continue;
      const int64_t width = round_up(c.rows, kLanes), tile = keys.end - keys.begin;
      const int64_t offset = (keys.begin - block) * padded_dim;
      multiply<Start::zero>(tile, width, dim, k + offset, padded_dim, 1, c.q, kQueryChunk, scores, kQueryChunk);
      softmax_tile(segment, c, keys, scale_log2, scores, factor);
      // The first tile of a chunk starts the output; later ones rescale it.
      if (keys.begin == seen.begin) {
        multiply<Start::zero>(dim, width, tile, v + offset, 1, padded_dim, scores, kQueryChunk, c.out, kQueryChunk);
      } else {
        multiply<Start::scaled_add>(dim, width, tile, v + offset, 1, padded_dim, scores, kQueryChunk, c.out, kQueryChunk,
                                    factor);
      }
    }
  }

  for (int64_t n = 0; n < count; ++n) {
    const Chunk c = chunk_at(n);
    finish_chunk(call, segment, c, padded_dim, rows);
  }
}

}  // namespace TE_SIMD
}  // namespace te
