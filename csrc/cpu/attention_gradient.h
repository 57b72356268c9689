// What the backward kernels share: from scores to P and dS, and the sum of dQ over blocks of keys.
#pragma once

#include "attention_tile.h"

namespace te {
namespace TE_SIMD {
namespace {

// scores := P = exp2(scores * scale - lse), dp := dS = P (dp - delta), both 0 where the query does not see the key.
inline void gradient_tile(const AttentionSegment& segment, int64_t row, int64_t rows, KeyRange keys, float scale_log2,
                          const float* lse, const float* delta, float* scores, float* dp) {
  const int64_t count = keys.end - keys.begin;
  const bool masked = rows % kLanes != 0 || !sees_all(segment, row, rows, keys);
  for (int64_t lane = 0; lane < round_up(rows, kLanes); lane += kLanes) {
    const LaneKeys seen = masked ? lane_keys(segment, row, rows, lane, keys) : LaneKeys{};
    const Vec log_sum = load(lse + lane) * kLog2e, mean = load(delta + lane);
    for (int64_t j = 0; j < count; ++j) {
      float* at = scores + j * kQueryChunk + lane;
      float* d_at = dp + j * kQueryChunk + lane;
      Vec p = exp2(load(at) * scale_log2 - log_sum);
      Vec ds = p * (load(d_at) - mean);
      if (masked) {
        const VecInt visible = seen.at(j);
        p = visible ? p : splat(0.0f);
        ds = visible ? ds : splat(0.0f);
      }
      store(at, p);
      store(d_at, ds);
    }
  }
}

// Adds rows to the dQ accumulator; the first block of keys that a chunk sees overwrites what was there.
inline void accumulate_dq(const AttentionCall& call, const AttentionSegment& segment, int64_t head, int64_t row,
                          int64_t rows, int64_t padded_dim, bool first, const float* dq) {
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

// One row of the dQ accumulator; 0 for a query that sees no key, whose row may never have been written.
inline void read_dq(const AttentionCall& call, const AttentionSegment& segment, int64_t head, int64_t row, int64_t padded_dim,
                    float* to) {
  if (first_key(segment, row) > last_key(segment, row)) {
    fill(to, padded_dim, 0.0f);
  } else if (!call.dq_bf16) {
    const float* from = static_cast<const float*>(call.dq_acc) + (head * call.rows_q + segment.q_start + row) * call.dim;
    read_row(reinterpret_cast<const char*>(from), AttentionDType::f32, call.dim, padded_dim, to);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(call.dq_acc) +
                           ((segment.index * call.heads + head) * call.dq_rows + row) * kDqPaddedHeadDim;
    read_row(reinterpret_cast<const char*>(from), AttentionDType::bf16, call.dim, padded_dim, to);
  }
}

}  // namespace
}  // namespace TE_SIMD
}  // namespace te
