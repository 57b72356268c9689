// Rotary embedding of the heads of tokens: half-split pairs (i, i + D/2), angle = position * inv_freq[i] in FP32.
//
// Shared by the plain and the quantising kernels, so that all give the same values. Where heads are read is a From (Heads, QkvRows or
// QkvParts below), what becomes of the rotated values is a function of the kernel.
#pragma once
#include "numeric.cuh"

namespace te {

constexpr int kRopeThreads = 128;  // of the plain kernels; a thread holds eight pairs, so D is at most 16 times that
constexpr int kMaxRopeDim = 16 * kRopeThreads;

// p[t * stride_t + h * stride_h + d]. Numbers of tokens and strides (in elements) fit in 32 bits, as the host code checks.
template <typename T>
struct Heads {
  T* p;
  int stride_t, stride_h;
  __device__ __forceinline__ T* at(int t, int h) const { return p + static_cast<int64_t>(t) * stride_t + static_cast<int64_t>(h) * stride_h; }
};

// The order of H heads of q and G of k and of v in a row. Everywhere else they are numbered: all of q, then k, then v.
struct QkvLayout {
  int H, G;
  int ratio;  // 0: split, the order of the numbers. H / G: grouped, for each kv head its heads of q, then k, then v
  __device__ __forceinline__ int place(int h) const {
    if (ratio == 0) return h;
    if (h < H) return h + h / ratio * 2;
    return h < H + G ? (h - H) * (ratio + 2) + ratio : (h - H - G) * (ratio + 2) + ratio + 1;
  }
};

// The heads of rows [T, (H + 2G) * D].
template <typename T>
struct QkvRows {
  T* p;
  int stride_t, D;
  QkvLayout layout;
  __device__ __forceinline__ T* at(int t, int h) const { return p + static_cast<int64_t>(t) * stride_t + layout.place(h) * D; }
};

// The same heads in tensors of their own.
template <typename T>
struct QkvParts {
  Heads<T> q, k, v;
  int H, G;
  __device__ __forceinline__ T* at(int t, int h) const {
    if (h < H) return q.at(t, h);
    return h < H + G ? k.at(t, h - H) : v.at(t, h - H - G);
  }
};

struct Rotation {
  const int* positions;   // [T]
  const float* inv_freq;  // [D / 2]
  int D;
  int heads, rotated;  // heads of a token; those from number `rotated` on are copied as they are
  bool inverse;
};

// How a block of `threads` divides the work: a thread holds eight pairs of columns of heads head, head + step, ...; with few heads `tokens`
// tokens are done side by side.
struct RopeShape {
  int vectors;  // threads of a head
  int tokens, step;
  __host__ RopeShape(const Rotation& r, int threads) {
    vectors = (r.D / 2 + 7) / 8;
    const int heads_at_once = threads / vectors;
    tokens = heads_at_once > r.heads ? heads_at_once / r.heads : 1;
    step = heads_at_once < r.heads ? heads_at_once : r.heads;
  }
  // Floats of shared memory: cosines and sines of the tokens being done, and of those before, which some threads may still read.
  __host__ int table_floats(const Rotation& r) const { return 4 * tokens * (r.D / 2); }
};

// Two products and one rounding each, spelled out: left to the compiler, kernels could differ in the last bit.
template <typename T>
__device__ __forceinline__ void rotate(const Vec8<T>& a, const Vec8<T>& b, const float (&cosine)[8], const float (&sine)[8], Vec8<T>& ya, Vec8<T>& yb) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    float p[2], q[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float x = a.get(j + k), y = b.get(j + k), c = cosine[j + k], s = sine[j + k];
      p[k] = __fmaf_rn(x, c, -__fmul_rn(y, s));
      q[k] = __fmaf_rn(y, c, __fmul_rn(x, s));
    }
    ya.set2(j, p[0], p[1]);
    yb.set2(j, q[0], q[1]);
  }
}

// Eight entries of a table of D/2; past its end the last one again.
template <bool VEC>
__device__ __forceinline__ void load_angles(const float* table, int column, int half, float (&out)[8]) {
  if constexpr (VEC) {
    const float4 low = *reinterpret_cast<const float4*>(table + column), high = *reinterpret_cast<const float4*>(table + column + 4);
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w, out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = table[min(column + j, half - 1)];
  }
}

// Rotates every head of tokens first .. end - 1 and hands the results on: to(t, h, column, n, ya, yb) gets n of the values from `column`
// on, and as many from column + D/2 on. K heads a thread are on their way from memory while angles are made and values written.
// VEC: D is a multiple of 16 and heads start on 16 bytes. table: table_floats in shared memory, 16-byte aligned.
template <typename T, bool VEC, int THREADS, int K, class From, class To>
__device__ __forceinline__ void rope_heads(const Rotation& r, const RopeShape& shape, const From& from, To&& to, float* table, int first, int end) {
  const int row = threadIdx.x / shape.vectors, column = threadIdx.x % shape.vectors * 8, token = row / r.heads;
  const bool works = shape.tokens > 1 ? token < shape.tokens : row < shape.step;
  const int first_head = works ? row - token * r.heads : r.heads;
  const int half = r.D / 2, n = VEC ? 8 : half - column, size = shape.tokens * half;
  Vec8<T> a[K], b[K];
  auto load = [&](int k, int t, int h) {
    if (h >= r.heads || t >= end) return;
    const T* p = from.at(t, h) + column;
    a[k].template load_n<VEC>(p, n);
    b[k].template load_n<VEC>(p + half, n);
  };
#pragma unroll
  for (int k = 0; k < K; ++k) load(k, first + token, first_head + k * shape.step);
#pragma unroll 1
  for (int t = first; t < end; t += shape.tokens) {
    for (int i = threadIdx.x; i < size; i += THREADS) {
      const int of = shape.tokens == 1 ? 0 : i / half;
      if (t + of >= end) break;
      float s, c;
      sincosf(static_cast<float>(r.positions[t + of]) * r.inv_freq[i - of * half], &s, &c);
      table[i] = c;
      table[size + i] = r.inverse ? -s : s;
    }
    __syncthreads();
    float cosine[8], sine[8];
    if (first_head < r.heads) {
      load_angles<VEC>(table + token * half, column, half, cosine);
      load_angles<VEC>(table + size + token * half, column, half, sine);
    }
#pragma unroll 1
    for (int head = first_head; head < r.heads; head += K * shape.step) {
      const bool last = head + K * shape.step >= r.heads;
      const int here = t + token, next_t = last ? here + shape.tokens : here;
      const int next_head = last ? first_head : head + K * shape.step;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int h = head + k * shape.step;
        Vec8<T> ya = a[k], yb = b[k];
        if (h < r.rotated) rotate(a[k], b[k], cosine, sine, ya, yb);
        load(k, next_t, next_head + k * shape.step);
        if (h < r.heads && here < end) to(here, h, column, n, ya, yb);
      }
    }
    // One barrier a round is enough: a table is written again two rounds later.
    table += (t - first) / shape.tokens % 2 ? -2 * size : 2 * size;
  }
}

}  // namespace te
