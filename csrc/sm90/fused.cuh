// Sources of the fused quantising kernels: values of another op, made from its inputs in registers, rounded to BF16 as the op
// alone would round them (so fused and unfused give the same bytes), never written to memory. BF16 only.
#pragma once
#include "quantize.cuh"
#include "swiglu.cuh"

namespace te {

// RMSNorm of x with known rstd.
struct NormSource {
  using type = bf16;
  static constexpr bool kPair = false, kFused = true;
  const bf16* x;
  int64_t stride;
  const float* rstd;
  const void* w;
  bool w_fp32;
  __device__ __forceinline__ void load(int64_t row, int64_t col, int64_t n, Vec8<bf16>& v) const {
    if (n <= 0) return v.zero();
    Vec8<bf16> in;
    in.load(x + row * stride + col);
    const float s = rstd[row];
    float weight[8];
    if (w_fp32) {
      Vec8<float> a;
      a.load(static_cast<const float*>(w) + col);
#pragma unroll
      for (int j = 0; j < 8; ++j) weight[j] = a.get(j);
    } else {
      Vec8<bf16> a;
      a.load(static_cast<const bf16*>(w) + col);
#pragma unroll
      for (int j = 0; j < 8; ++j) weight[j] = a.get(j);
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) v.set2(j, in.get(j) * s * weight[j], in.get(j + 1) * s * weight[j + 1]);
  }
};

// silu(gate) * up of x[R, 2C].
struct SwigluSource {
  using type = bf16;
  static constexpr bool kPair = false, kFused = true;
  const bf16* x;
  int64_t stride, C;
  __device__ __forceinline__ void load(int64_t row, int64_t col, int64_t n, Vec8<bf16>& v) const {
    if (n <= 0) return v.zero();
    Vec8<bf16> gate, up;
    gate.load(x + row * stride + col);
    up.load(x + row * stride + C + col);
    swiglu(gate, up, v);
  }
};

// Gradient of SwiGLU: dx[R, 2C] = [d_gate | d_up] from dy[R, C] and x[R, 2C], both halves from one read.
struct SwigluGradientSource {
  using type = bf16;
  static constexpr bool kPair = true, kFused = true;
  const bf16* dy;
  const bf16* x;
  int64_t dy_stride, stride, C;
  __device__ __forceinline__ void load(int64_t row, int64_t col, int64_t n, Vec8<bf16>& d_gate, Vec8<bf16>& d_up) const {
    if (n <= 0) return d_gate.zero(), d_up.zero();
    Vec8<bf16> grad, gate, up;
    grad.load(dy + row * dy_stride + col);
    gate.load(x + row * stride + col);
    up.load(x + row * stride + C + col);
    swiglu_gradient(grad, gate, up, d_gate, d_up);
  }
};

}  // namespace te
