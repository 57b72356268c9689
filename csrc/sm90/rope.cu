// Rotary embedding, half-split pairs (i, i + D/2): angle = position * inv_freq in FP32, y = x rotated (inverse: rotated back).
//
// One token a block: sine and cosine of its D/2 angles are made once in shared memory and serve every head.
#include "host.h"

namespace te {
namespace {

constexpr int kThreads = 128;

template <typename T, bool VEC>
__global__ void __launch_bounds__(kThreads) rope_kernel(const T* x, int64_t stride_t, int64_t stride_h, const int* positions, const float* inv_freq, T* y,
                                                        int H, int D, bool inverse) {
  extern __shared__ float sm[];
  const int half = D / 2;
  float *cosine = sm, *sine = sm + half;
  const int64_t t = blockIdx.x;
  const float position = static_cast<float>(positions[t]);
  const int vectors = (half + 7) / 8;
  // The first values are asked for before the angles are made.
  Vec8<T> a, b;
  auto load = [&](int u) {
    const int i = u % vectors * 8;
    const T* in = x + t * stride_t + u / vectors * stride_h + i;
    a.template load_n<VEC>(in, half - i);
    b.template load_n<VEC>(in + half, half - i);
  };
  if (threadIdx.x < H * vectors) load(threadIdx.x);
  for (int i = threadIdx.x; i < half; i += kThreads) {
    float s, c;
    sincosf(position * inv_freq[i], &s, &c);
    cosine[i] = c;
    sine[i] = inverse ? -s : s;
  }
  __syncthreads();
  for (int u = threadIdx.x; u < H * vectors; u += kThreads) {
    const int h = u / vectors, i = u % vectors * 8;
    Vec8<T> out_a, out_b;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      float ya[2], yb[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int at = VEC || i + j + k < half ? i + j + k : half - 1;
        const float c = cosine[at], s = sine[at], p = a.get(j + k), q = b.get(j + k);
        ya[k] = p * c - q * s;
        yb[k] = q * c + p * s;
      }
      out_a.set2(j, ya[0], ya[1]);
      out_b.set2(j, yb[0], yb[1]);
    }
    if (u + kThreads < H * vectors) load(u + kThreads);
    T* out = y + (t * H + h) * D + i;
    out_a.template store_n<VEC>(out, half - i);
    out_b.template store_n<VEC>(out + half, half - i);
  }
}

void rope(TensorView x, TensorView positions, TensorView inv_freq, TensorView y, int64_t inverse) {
  const Launch l(x);
  const Type type = float_type(x, "x");
  TE_CHECK(x.ndim() == 3, "x must be [T, H, D], got " << shape_text(x));
  const int64_t tokens = x.size(0), H = x.size(1), D = x.size(2);
  TE_CHECK(D > 0 && D % 2 == 0 && D <= 4096, "head dim " << D << " must be even and at most 4096");
  TE_CHECK(x.numel() == 0 || x.stride(2) == 1, "x must have innermost stride 1");
  check_i32(positions, "positions");
  check_shape(positions, "positions", {tokens});
  check_f32(inv_freq, "inv_freq");
  check_shape(inv_freq, "inv_freq", {D / 2});
  check_shape(y, "y", {tokens, H, D});
  check_contiguous(y, "y");
  TE_CHECK(float_type(y, "y") == type, "y must have the dtype of x");
  for (const auto& [t, name] : {std::pair{positions, "positions"}, {inv_freq, "inv_freq"}, {y, "y"}}) check_same_device(t, x, name);
  if (tokens == 0 || H == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const T* in = pointer<const T>(x);
    T* out = pointer<T>(y);
    const int64_t st = tokens > 1 ? x.stride(0) : H * D, sh = H > 1 ? x.stride(1) : D;
    const bool vec = D % 16 == 0 && aligned(in, 16) && aligned(out, 16) && st * sizeof(T) % 16 == 0 && sh * sizeof(T) % 16 == 0;
    auto kernel = vec ? rope_kernel<T, true> : rope_kernel<T, false>;
    kernel<<<static_cast<unsigned>(tokens), kThreads, D * sizeof(float), l.stream>>>(in, st, sh, pointer<const int>(positions), pointer<const float>(inv_freq),
                                                                                     out, static_cast<int>(H), static_cast<int>(D), inverse != 0);
  });
  TE_LAUNCHED("rope");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope, te::rope);
