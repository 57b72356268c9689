// Attention backward for one block of keys: dK and dV of the block stay in cache while the queries that see it pass by, and dQ is
// added to the accumulator block by block, in the order of the blocks.
//
// As in the forward, scores, P, dP and dS are held as [key, query]; dK = dS Q and dV = P dO need Q and dO in rows as well, so
// both layouts of Q and dO are made once a chunk.
#include "attention_tile.h"

namespace te {
namespace TE_SIMD {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

// scores := P = exp2(scores * scale - lse), dp := dS = P (dp - delta), both 0 where the query does not see the key.
void gradient_tile(const AttentionSegment& segment, int64_t row, int64_t rows, KeyRange keys, float scale_log2, const float* lse,
                   const float* delta, float* scores, float* dp) {
  const int64_t count = keys.end - keys.begin;
  const bool masked = rows % kLanes != 0 || !sees_all(segment, row, rows, keys);
  for (int64_t lane = 0; lane < round_up(rows, kLanes); lane += kLanes) {
    VecInt first = {}, last = {};
    if (masked) {
      for (int i = 0; i < kLanes; ++i) {
        first[i] = int32_t(larger(first_key(segment, row + lane + i) - keys.begin, 0));
        last[i] = lane + i < rows ? int32_t(larger(last_key(segment, row + lane + i) - keys.begin, -1)) : -1;
      }
    }
    const Vec log_sum = load(lse + lane) * kLog2e, mean = load(delta + lane);
    for (int64_t j = 0; j < count; ++j) {
      float* at = scores + j * kQueryChunk + lane;
      float* d_at = dp + j * kQueryChunk + lane;
      Vec p = exp2(load(at) * scale_log2 - log_sum);
      Vec ds = p * (load(d_at) - mean);
      if (masked) {
        const VecInt key = splat_int(int32_t(j));
        const VecInt visible = (key >= first) & (key <= last);
        p = visible ? p : splat(0.0f);
        ds = visible ? ds : splat(0.0f);
      }
      store(at, p);
      store(d_at, ds);
    }
  }
}

// Adds rows to the dQ accumulator; the first block of keys that a chunk sees overwrites what was there.
void accumulate_dq(const AttentionCall& call, const AttentionSegment& segment, int64_t head, int64_t row, int64_t rows,
                   int64_t padded_dim, bool first, const float* dq) {
  const int64_t dim = call.dim;
  if (!call.dq_bf16) {
    for (int64_t r = 0; r < rows; ++r) {
      float* to = static_cast<float*>(call.dq_acc) + (head * call.rows_q + segment.q_start + row + r) * dim;
      const float* from = dq + r * padded_dim;
      int64_t c = 0;
      if (first) {
        for (; c + kLanes <= dim; c += kLanes) store(to + c, load(from + c));
        for (; c < dim; ++c) to[c] = from[c];
      } else {
        for (; c + kLanes <= dim; c += kLanes) store(to + c, load(to + c) + load(from + c));
        for (; c < dim; ++c) to[c] += from[c];
      }
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    uint16_t* to = static_cast<uint16_t*>(call.dq_acc) +
                   ((segment.index * call.heads + head) * call.dq_rows + row + r) * kDqPaddedHeadDim;
    const float* from = dq + r * padded_dim;
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) vec_to_bf16(to + c, first ? load(from + c) : bf16_to_vec(to + c) + load(from + c));
    for (; c < dim; ++c) to[c] = float_to_bf16(first ? from[c] : bf16_to_float(to[c]) + from[c]);
  }
}

}  // namespace

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
      Vec sum{};
      for (int64_t c = 0; c < padded_dim; c += kLanes) sum = fma(load(a + c), load(b + c), sum);
      call.delta[head * call.rows_q + row] = sum_lanes(sum);
    }
  }
}

void attention_dq_out(const AttentionCall& call, const AttentionSegment& segment, int64_t row_begin, int64_t row_end,
                      float* scratch) {
  const int64_t padded_dim = attention_padded_dim(call.dim);
  const AttentionTensor packed = {call.dq_acc, call.dim, call.rows_q * call.dim};
  for (int64_t row = row_begin; row < row_end; ++row) {
    const bool sees_keys = first_key(segment, row) <= last_key(segment, row);
    for (int64_t head = 0; head < call.heads; ++head) {
      if (!sees_keys) {
        fill(scratch, padded_dim, 0.0f);
      } else if (!call.dq_bf16) {
        const char* from = address(packed, AttentionDType::f32, segment.q_start + row, head);
        read_row(from, AttentionDType::f32, call.dim, padded_dim, scratch);
      } else {
        const uint16_t* from = static_cast<const uint16_t*>(call.dq_acc) +
                               ((segment.index * call.heads + head) * call.dq_rows + row) * kDqPaddedHeadDim;
        read_row(reinterpret_cast<const char*>(from), AttentionDType::bf16, call.dim, padded_dim, scratch);
      }
      write_row(const_cast<char*>(address(call.dq, call.dtype, segment.q_start + row, head)), call.dtype, call.dim, scratch,
                sees_keys ? call.scale : 0.0f);
    }
  }
}

}  // namespace TE_SIMD
}  // namespace te
