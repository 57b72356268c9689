// SwiGLU of eight elements and its gradient, rounded to the tensor's dtype: shared by the plain and the quantising kernels, so
// that both give the same values.
#pragma once
#include "numeric.cuh"

namespace te {

// 1 / (1 + e^-x). e^-x is the hardware's 2^t alone: subnormal results become 0, which the sum with 1 does not see, so the code that
// __expf keeps for them is not needed. x < -88.7: e^-x is infinite and the sigmoid 0.
__device__ __forceinline__ float sigmoid(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  return __fdividef(1.f, 1.f + e);
}

template <typename T>
__device__ __forceinline__ void swiglu(const Vec8<T>& gate, const Vec8<T>& up, Vec8<T>& y) {
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    y.set2(j, gate.get(j) * sigmoid(gate.get(j)) * up.get(j), gate.get(j + 1) * sigmoid(gate.get(j + 1)) * up.get(j + 1));
}

template <typename T>
__device__ __forceinline__ void swiglu_gradient(const Vec8<T>& dy, const Vec8<T>& gate, const Vec8<T>& up, Vec8<T>& d_gate, Vec8<T>& d_up) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    float dg[2], du[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float g = gate.get(j + h), s = sigmoid(g), grad = dy.get(j + h) * s;
      du[h] = grad * g;
      dg[h] = grad * up.get(j + h) * (1.f + g * (1.f - s));
    }
    d_gate.set2(j, dg[0], dg[1]);
    d_up.set2(j, du[0], du[1]);
  }
}

}  // namespace te
