// Inner loops of RMSNorm, SwiGLU, rotary embedding and cross-entropy (row_kernels.h). FP32 inside, one rounding at the end.
#include <cstdint>

#include "convert.h"
#include "row_kernels.h"
#include "vector_math.h"

namespace te {
namespace TE_SIMD {
namespace {

constexpr int64_t kLanes = 32;

struct Lanes {
  float v[kLanes];
};

TE_INLINE float sum_lanes(const Lanes& lanes) {
  float a[kLanes];
  for (int i = 0; i < kLanes; ++i) a[i] = lanes.v[i];
  for (int n = kLanes / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) a[i] += a[i + n];
  }
  return a[0];
}

// Sum over i < n of term(i).
template <typename F>
TE_INLINE float sum_row(int64_t n, const F& term) {
  Lanes lanes = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes.v[j] += term(i + j);
  }
  for (int64_t j = 0; i + j < n; ++j) lanes.v[j] += term(i + j);
  return sum_lanes(lanes);
}

template <typename T>
void rms_norm_forward_t(const T* x, int64_t rows, int64_t cols, const float* __restrict__ w, float eps, T* y, float* rstd) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* __restrict__ xr = x + r * cols;
    T* __restrict__ yr = y + r * cols;
    const float squares = sum_row(cols, [&](int64_t i) { return to_float(xr[i]) * to_float(xr[i]); });
    const float s = 1.0f / __builtin_sqrtf(squares / float(cols) + eps);
    rstd[r] = s;
    for (int64_t i = 0; i < cols; ++i) from_float(to_float(xr[i]) * s * w[i], yr + i);
  }
}

template <typename T>
void rms_norm_backward_t(const T* dy, const T* dh, const T* x, int64_t rows, int64_t cols, const float* __restrict__ w, const float* rstd,
                         T* dx, float* __restrict__ dw) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* __restrict__ g = dy + r * cols;
    const T* __restrict__ xr = x + r * cols;
    T* __restrict__ out = dx + r * cols;
    const float s = rstd[r];
    const float dot = sum_row(cols, [&](int64_t i) { return to_float(g[i]) * w[i] * (to_float(xr[i]) * s); });
    const float mean = dot / float(cols);
    const auto write = [&](auto finish) {
      for (int64_t i = 0; i < cols; ++i) {
        const float gi = to_float(g[i]), normed = to_float(xr[i]) * s;
        dw[i] += gi * normed;
        from_float(finish((gi * w[i] - normed * mean) * s, i), out + i);
      }
    };
    const T* __restrict__ more = dh ? dh + r * cols : nullptr;
    if (more) write([&](float d, int64_t i) { return d + to_float(more[i]); });
    else write([](float d, int64_t) { return d; });
  }
}

TE_INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

template <typename T>
void swiglu_forward_t(const T* x, int64_t rows, int64_t cols, T* y) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* __restrict__ gate = x + r * 2 * cols;
    const T* __restrict__ up = gate + cols;
    T* __restrict__ out = y + r * cols;
    for (int64_t i = 0; i < cols; ++i) {
      const float g = to_float(gate[i]);
      from_float(g * sigmoid(g) * to_float(up[i]), out + i);
    }
  }
}

template <typename T>
void swiglu_backward_t(const T* dy, const T* x, int64_t rows, int64_t cols, T* dx) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* __restrict__ d = dy + r * cols;
    const T* __restrict__ gate = x + r * 2 * cols;
    const T* __restrict__ up = gate + cols;
    T* __restrict__ dgate = dx + r * 2 * cols;
    T* __restrict__ dup = dgate + cols;
    for (int64_t i = 0; i < cols; ++i) {
      const float g = to_float(gate[i]), u = to_float(up[i]), di = to_float(d[i]);
      const float s = sigmoid(g);
      from_float(di * u * s * (1.0f + g * (1.0f - s)), dgate + i);
      from_float(di * g * s, dup + i);
    }
  }
}

template <typename T>
void rope_head_t(const T* __restrict__ x, const float* __restrict__ cosine, const float* __restrict__ sine, int64_t half,
                 T* __restrict__ y) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[i + half]);
    from_float(a * cosine[i] - b * sine[i], y + i);
    from_float(b * cosine[i] + a * sine[i], y + i + half);
  }
}

template <typename T>
TE_INLINE float max_row(const T* __restrict__ x, int64_t n) {
  Lanes best;
  for (int64_t j = 0; j < kLanes; ++j) best.v[j] = -bits_float(kInfBits);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) best.v[j] = to_float(x[i + j]) > best.v[j] ? to_float(x[i + j]) : best.v[j];
  }
  for (int64_t j = 0; i + j < n; ++j) best.v[j] = to_float(x[i + j]) > best.v[j] ? to_float(x[i + j]) : best.v[j];
  float m = best.v[0];
  for (int64_t j = 1; j < kLanes; ++j) m = best.v[j] > m ? best.v[j] : m;
  return m;
}

// The maximum passes over a NaN, but the sum of exponentials does not.
template <typename T>
void cross_entropy_forward_t(const T* __restrict__ x, int64_t n, int64_t label, float* loss, float* lse) {
  const float top = max_row(x, n);
  const float sum = sum_row(n, [&](int64_t i) { return fast_exp(to_float(x[i]) - top); });
  *lse = top + __builtin_logf(sum);
  *loss = label < 0 ? 0.0f : *lse - to_float(x[label]);
}

template <typename T>
void cross_entropy_backward_t(float dloss, const T* x, int64_t n, int64_t label, float lse, T* out) {
  if (label < 0) {
    for (int64_t i = 0; i < n; ++i) from_float(0.0f, out + i);
    return;
  }
  const float at_label = (fast_exp(to_float(x[label]) - lse) - 1.0f) * dloss;
  for (int64_t i = 0; i < n; ++i) from_float(fast_exp(to_float(x[i]) - lse) * dloss, out + i);
  from_float(at_label, out + label);
}

#define TE_BY_DTYPE(dtype, call)                    \
  switch (dtype) {                                  \
    case kRowF32: { using T = float; call; break; } \
    case kRowBf16: { using T = bf16; call; break; } \
    default: { using T = f16; call; break; }        \
  }

template <typename T>
TE_INLINE const T* as(const void* p) {
  return static_cast<const T*>(p);
}
template <typename T>
TE_INLINE T* as(void* p) {
  return static_cast<T*>(p);
}

}  // namespace

void rms_norm_forward_rows(int dtype, const void* x, int64_t rows, int64_t cols, const float* w, float eps, void* y, float* rstd) {
  TE_BY_DTYPE(dtype, rms_norm_forward_t(as<T>(x), rows, cols, w, eps, as<T>(y), rstd))
}

void rms_norm_backward_rows(int dtype, const void* dy, const void* dh, const void* x, int64_t rows, int64_t cols, const float* w,
                            const float* rstd, void* dx, float* dw) {
  TE_BY_DTYPE(dtype, rms_norm_backward_t(as<T>(dy), as<T>(dh), as<T>(x), rows, cols, w, rstd, as<T>(dx), dw))
}

void add(int dtype, const void* a, const void* b, int64_t n, void* sum) {
  TE_BY_DTYPE(dtype, {
    const T* __restrict__ x = as<T>(a);
    const T* __restrict__ y = as<T>(b);
    T* __restrict__ out = as<T>(sum);
    for (int64_t i = 0; i < n; ++i) from_float(to_float(x[i]) + to_float(y[i]), out + i);
  })
}

void swiglu_forward_rows(int dtype, const void* x, int64_t rows, int64_t cols, void* y) {
  TE_BY_DTYPE(dtype, swiglu_forward_t(as<T>(x), rows, cols, as<T>(y)))
}

void swiglu_backward_rows(int dtype, const void* dy, const void* x, int64_t rows, int64_t cols, void* dx) {
  TE_BY_DTYPE(dtype, swiglu_backward_t(as<T>(dy), as<T>(x), rows, cols, as<T>(dx)))
}

void rope_angles(int32_t position, const float* __restrict__ inv_freq, int64_t half, bool inverse, float* __restrict__ cosine,
                 float* __restrict__ sine) {
  const float p = float(position), sign = inverse ? -1.0f : 1.0f;
  for (int64_t i = 0; i < half; ++i) {
    const SinCos sc = fast_sincos(p * inv_freq[i]);
    cosine[i] = sc.cosine;
    sine[i] = sc.sine * sign;
  }
}

void rope_head(int dtype, const void* x, const float* cosine, const float* sine, int64_t half, void* y) {
  TE_BY_DTYPE(dtype, rope_head_t(as<T>(x), cosine, sine, half, as<T>(y)))
}

void cross_entropy_forward_row(int dtype, const void* logits, int64_t n, int64_t label, float* loss, float* lse) {
  TE_BY_DTYPE(dtype, cross_entropy_forward_t(as<T>(logits), n, label, loss, lse))
}

void cross_entropy_backward_row(int dtype, float dloss, const void* logits, int64_t n, int64_t label, float lse, void* dlogits) {
  TE_BY_DTYPE(dtype, cross_entropy_backward_t(dloss, as<T>(logits), n, label, lse, as<T>(dlogits)))
}

void widen(int dtype, const void* from, int64_t n, float* __restrict__ to) {
  TE_BY_DTYPE(dtype, {
    const T* __restrict__ x = as<T>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(x[i]);
  })
}

}  // namespace TE_SIMD
}  // namespace te
