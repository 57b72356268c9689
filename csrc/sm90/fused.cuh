// Sources of the fused quantising kernels: values of another op, made from its inputs in registers, rounded to BF16 as the op alone would
// round them (so fused and unfused give the same bytes), never written to memory. BF16 only.
#pragma once
#include "quantize.cuh"
#include "swiglu.cuh"

namespace te {

// Eight weights as FP32, zeros past the width.
struct Weights {
  float w[8];
  Weights() = default;
  __device__ __forceinline__ Weights(const void* p, bool fp32, int64_t col, int64_t width) {
    if (col >= width) {
#pragma unroll
      for (int j = 0; j < 8; ++j) w[j] = 0.f;
    } else if (fp32) {
      Vec8<float> a;
      a.load(static_cast<const float*>(p) + col);
#pragma unroll
      for (int j = 0; j < 8; ++j) w[j] = a.get(j);
    } else {
      Vec8<bf16> a;
      a.load(static_cast<const bf16*>(p) + col);
#pragma unroll
      for (int j = 0; j < 8; ++j) w[j] = a.get(j);
    }
  }
};

__device__ __forceinline__ void normalise(const Vec8<bf16>& in, float rstd, const Weights& weights, Vec8<bf16>& v) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) v.set2(j, in.get(j) * rstd * weights.w[j], in.get(j + 1) * rstd * weights.w[j + 1]);
}

// Whether scales come from an amax of the whole output or of its rows, so that RMSNorm + quantise takes two passes.
inline bool needs_amax_first(const QuantArgs& q, int64_t granularity) { return granularity == kRow || (granularity == kTensor && !q.scale); }

// What rstd is before norm_cast.cuh has found it; no rstd is negative.
constexpr float kUnknownRstd = -1.f;

// RMSNorm of x with known rstd.
struct NormSource {
  using type = bf16;
  static constexpr bool kPair = false;
  static constexpr int kAhead = 4;
  struct Inputs {
    Vec8<bf16> x;
    float rstd;
  };
  const bf16* x;
  int64_t stride;
  const float* rstd;
  const void* w;
  bool w_fp32;
  __device__ __forceinline__ Weights prepare(int64_t col, int n) const { return Weights(w, w_fp32, col, col + n); }
  __device__ __forceinline__ Inputs load(int64_t row, int64_t col, int n) const {
    Inputs in;
    in.x.load_n<true>(x + row * stride + col, n);
    in.rstd = n > 0 ? rstd[row] : 0.f;
    return in;
  }
  __device__ __forceinline__ void make(const Inputs& in, const Weights& weights, Vec8<bf16>& v, Vec8<bf16>&) const {
    normalise(in.x, in.rstd, weights, v);
  }
};

// silu(gate) * up of x[R, 2C].
struct SwigluSource {
  using type = bf16;
  static constexpr bool kPair = false;
  static constexpr int kAhead = 4;
  struct Inputs {
    Vec8<bf16> gate, up;
  };
  const bf16* x;
  int64_t stride, C;
  __device__ __forceinline__ Nothing prepare(int64_t, int) const { return {}; }
  __device__ __forceinline__ Inputs load(int64_t row, int64_t col, int n) const {
    Inputs in;
    const bf16* at = x + row * stride + col;
    in.gate.load_n<true>(at, n);
    in.up.load_n<true>(at + C, n);
    return in;
  }
  __device__ __forceinline__ void make(const Inputs& in, const Nothing&, Vec8<bf16>& v, Vec8<bf16>&) const { swiglu(in.gate, in.up, v); }
};

// Gradient of SwiGLU: dx[R, 2C] = [d_gate | d_up] from dy[R, C] and x[R, 2C], both halves from one read.
struct SwigluGradientSource {
  using type = bf16;
  static constexpr bool kPair = true;
  static constexpr int kAhead = 4;
  struct Inputs {
    Vec8<bf16> grad, gate, up;
  };
  const bf16* dy;
  const bf16* x;
  int64_t dy_stride, stride, C;
  __device__ __forceinline__ Nothing prepare(int64_t, int) const { return {}; }
  __device__ __forceinline__ Inputs load(int64_t row, int64_t col, int n) const {
    Inputs in;
    const bf16* at = x + row * stride + col;
    in.grad.load_n<true>(dy + row * dy_stride + col, n);
    in.gate.load_n<true>(at, n);
    in.up.load_n<true>(at + C, n);
    return in;
  }
  __device__ __forceinline__ void make(const Inputs& in, const Nothing&, Vec8<bf16>& d_gate, Vec8<bf16>& d_up) const {
    swiglu_gradient(in.grad, in.gate, in.up, d_gate, d_up);
  }
};

}  // namespace te
