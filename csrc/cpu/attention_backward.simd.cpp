// Attention backward for one block of keys: dK and dV of the block stay in cache while the queries that see it pass by, and dQ is
// added to the accumulator block by block, in the order of the blocks.
//
// As in the forward, scores, P, dP and dS are held as [key, query]; dK = dS Q and dV = P dO need Q and dO in rows as well, so
// both layouts of Q and dO are made once a chunk.
#include "attention_gradient.h"
#include "attention_tile.h"

namespace te {
namespace TE_SIMD {

int64_t attention_backward_scratch(const AttentionCall& call) {
  const int64_t padded_dim = attention_padded_dim(call.dim), keys = attention_backward_keys(call.dim);
  return 4 * keys * padded_dim + 6 * kQueryChunk * padded_dim + 2 * keys * kQueryChunk + 2 * kQueryChunk;
}

void attention_backward_item(const AttentionCall& call, const AttentionSegment& segment, const AttentionBackwardItem& item,
                             void (*wait)(const int64_t* progress, int64_t at_least), float* scratch) {
  const int64_t dim = call.dim, padded_dim = attention_padded_dim(dim), block = attention_backward_keys(dim);
  const int64_t group = call.heads / call.kv_heads, keys_count = item.key_end - item.key_begin;
  const float scale_log2 = call.scale * kLog2e;
  float* k = scratch;
  float* v = k + block * padded_dim;
  float* dk = v + block * padded_dim;
  float* dv = dk + block * padded_dim;
  float* q = dv + block * padded_dim;             // [query, dim]
  float* dout = q + kQueryChunk * padded_dim;     // [query, dim]
  float* dq = dout + kQueryChunk * padded_dim;    // [query, dim]
  float* q_t = dq + kQueryChunk * padded_dim;     // [dim, query]
  float* dout_t = q_t + kQueryChunk * padded_dim;
  float* dq_t = dout_t + kQueryChunk * padded_dim;
  float* p = dq_t + kQueryChunk * padded_dim;     // [key, query]
  float* ds = p + block * kQueryChunk;            // [key, query]
  float* lse = ds + block * kQueryChunk;
  float* delta = lse + kQueryChunk;

  fill(dk, keys_count * padded_dim, 0.0f);
  fill(dv, keys_count * padded_dim, 0.0f);
  bool read = false;
  for (int64_t row = 0; row < segment.q_len; row += kQueryChunk) {
    const int64_t rows = smaller(kQueryChunk, segment.q_len - row), width = round_up(rows, kLanes);
    const KeyRange seen = keys_of(segment, row, rows);
    const KeyRange keys = {larger(item.key_begin, seen.begin), smaller(item.key_end, seen.end)};
    if (seen.begin >= item.key_end && seen.begin < seen.end) break;  // later queries see later keys only
    if (keys.begin >= keys.end) continue;
    if (!read) {
      read_rows(call.k, call.dtype, segment.k_start + item.key_begin, keys_count, item.kv_head, dim, padded_dim, k);
      read_rows(call.v, call.dtype, segment.k_start + item.key_begin, keys_count, item.kv_head, dim, padded_dim, v);
      read = true;
    }
    const int64_t count = keys.end - keys.begin, offset = (keys.begin - item.key_begin) * padded_dim;
    const bool first = seen.begin >= item.key_begin;
    for (int64_t head = item.kv_head * group; head < (item.kv_head + 1) * group; ++head) {
      read_rows(call.q, call.dtype, segment.q_start + row, rows, head, dim, padded_dim, q);
      read_rows(call.dout, call.dtype, segment.q_start + row, rows, head, dim, padded_dim, dout);
      fill(q + rows * padded_dim, (width - rows) * padded_dim, 0.0f);
      fill(dout + rows * padded_dim, (width - rows) * padded_dim, 0.0f);
      transpose(width, padded_dim, q, padded_dim, q_t, kQueryChunk);
      transpose(width, padded_dim, dout, padded_dim, dout_t, kQueryChunk);
      const int64_t at = head * call.rows_q + segment.q_start + row;
      for (int64_t i = 0; i < rows; ++i) {
        lse[i] = call.lse[at + i];
        delta[i] = call.delta[at + i];
      }
      fill(lse + rows, kQueryChunk - rows, 0.0f);
      fill(delta + rows, kQueryChunk - rows, 0.0f);

      multiply<Start::zero>(count, width, dim, k + offset, padded_dim, 1, q_t, kQueryChunk, p, kQueryChunk);
      multiply<Start::zero>(count, width, dim, v + offset, padded_dim, 1, dout_t, kQueryChunk, ds, kQueryChunk);
      gradient_tile(segment, row, rows, keys, scale_log2, lse, delta, p, ds);
      multiply<Start::add>(count, padded_dim, rows, p, kQueryChunk, 1, dout, padded_dim, dv + offset, padded_dim);
      multiply<Start::add>(count, padded_dim, rows, ds, kQueryChunk, 1, q, padded_dim, dk + offset, padded_dim);
      multiply<Start::zero>(dim, width, count, k + offset, 1, padded_dim, ds, kQueryChunk, dq_t, kQueryChunk);
      transpose(padded_dim, width, dq_t, kQueryChunk, dq, padded_dim);
      if (item.previous != nullptr && head == item.kv_head * group) wait(item.previous, row + 1);
      accumulate_dq(call, segment, head, row, rows, padded_dim, first, dq);
    }
    __atomic_store_n(item.progress, row + 1, __ATOMIC_RELEASE);
  }
  write_rows(call.dk, call.dtype, segment.k_start + item.key_begin, keys_count, item.kv_head, dim, padded_dim, dk, call.scale);
  write_rows(call.dv, call.dtype, segment.k_start + item.key_begin, keys_count, item.kv_head, dim, padded_dim, dv, 1.0f);
}

void attention_delta(const AttentionCall& call, const AttentionSegment& segment, int64_t row_begin, int64_t row_end,
                     float* scratch) {
  const int64_t padded_dim = attention_padded_dim(call.dim);
  float* a = scratch;
  float* b = a + padded_dim;
  for (int64_t row = segment.q_start + row_begin; row < segment.q_start + row_end; ++row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      read_row(address(call.dout, call.dtype, row, head), call.dtype, call.dim, padded_dim, a);
      read_row(address(call.out, call.dtype, row, head), call.dtype, call.dim, padded_dim, b);
      call.delta[head * call.rows_q + row] = dot(a, b, padded_dim);
    }
  }
}

void attention_dq_out(const AttentionCall& call, const AttentionSegment& segment, int64_t row_begin, int64_t row_end,
                      float* scratch) {
  const int64_t padded_dim = attention_padded_dim(call.dim);
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      read_dq(call, segment, head, row, padded_dim, scratch);
      write_rows(call.dq, call.dtype, segment.q_start + row, 1, head, call.dim, padded_dim, scratch, call.scale);
    }
  }
}

}  // namespace TE_SIMD
}  // namespace te
