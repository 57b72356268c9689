// RMSNorm: y = h * rstd * w, rstd = 1 / sqrt(mean(h^2) + eps), FP32 inside, one row a block; h = x, or x + residual rounded to their dtype.
//
// forward reads x (and residual) once and writes y, rstd (and h). backward reads dy, h once and writes dx; dh, the gradient that reaches h
// by other ways, is added before the one rounding of dx. dw is summed per block over the rows that the block owns and then over blocks in a
// fixed order, so it is the same in every run.
#include "host.h"
#include "row_ring.cuh"
#include "scratch.h"

namespace te {
namespace {

// w as the dtype of x or FP32.
template <typename T>
struct Weight {
  const void* p;
  bool fp32;
  // Columns c .. c+7 of C as FP32, zeros past the end.
  template <bool VEC>
  __device__ __forceinline__ void load(int c, int C, float (&out)[8]) const {
    if (fp32) {
      Vec8<float> v;
      v.load_n<VEC>(static_cast<const float*>(p) + c, C - c);
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = v.get(j);
    } else {
      Vec8<T> v;
      v.template load_n<VEC>(static_cast<const T*>(p) + c, C - c);
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = v.get(j);
    }
  }
};

// A residual and its sum with x, [R, C].
template <typename T>
struct Residual {
  const T* p;
  T* h;
};

template <typename T, int VECS, bool VEC, bool RESIDUAL>
__global__ void __launch_bounds__(kRowThreads, VECS * Elem<T>::kWords <= 8 ? 4 : 1)
    rms_norm_forward_kernel(const T* x, int64_t stride, Residual<T> residual, Weight<T> w, T* y, float* rstd, int C, float eps) {
  __shared__ float sm[kRowThreads / 32];
  const int64_t r = blockIdx.x;
  const T* in = x + r * stride;
  Vec8<T> v[VECS];
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < VECS; ++k) v[k].template load_n<VEC>(in + row_column(k), C - row_column(k));
  if constexpr (RESIDUAL) {
    Vec8<T> add[VECS];
#pragma unroll
    for (int k = 0; k < VECS; ++k) add[k].template load_n<VEC>(residual.p + r * C + row_column(k), C - row_column(k));
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
      v[k].add(add[k]);
      v[k].template store_n<VEC>(residual.h + r * C + row_column(k), C - row_column(k));
    }
  }
#pragma unroll
  for (int k = 0; k < VECS; ++k)
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(v[k].get(j), v[k].get(j), sum);
  const float s = rsqrt_exact(block_sum(sum, sm) / C + eps);
  if (threadIdx.x == 0) rstd[r] = s;
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int c = row_column(k);
    if (c >= C) break;
    float weight[8];
    w.template load<VEC>(c, C, weight);
    Vec8<T> out;
#pragma unroll
    for (int j = 0; j < 8; j += 2) out.set2(j, v[k].get(j) * s * weight[j], v[k].get(j + 1) * s * weight[j + 1]);
    out.template store_n<VEC>(y + r * C + c, C - c);
  }
}

// How the backward reads rows: dy, h and (RESIDUAL) dh.
template <typename T, int VECS, bool VEC, bool RESIDUAL>
struct BackwardShape {
  static constexpr int kInputs = RESIDUAL ? 3 : 2;
  static constexpr int kBlocks = VECS * Elem<T>::kWords <= 16 ? 2 : 1;  // by registers
  // Of 128 or 256 registers a thread, beside dy, h, dw and the weights in FP32.
  static constexpr bool kKeepsWeights = VEC && VECS * (2 * Elem<T>::kWords + 16) <= (kBlocks == 2 ? 64 : 192);
  using Ring = RowRing<T, VECS, kInputs, kBlocks>;
  static constexpr bool kRing = VEC && Ring::kFits;  // else straight from memory: rows off 16 bytes, FP32 wider than 8192
  static constexpr int kSmem = kRing ? Ring::kSmem : 0;
};

// Rows blockIdx.x, blockIdx.x + gridDim.x, ...; partial[blockIdx.x, C] receives this block's share of dw.
template <typename T, int VECS, bool VEC, bool RESIDUAL>
__global__ void __launch_bounds__(kRowThreads, BackwardShape<T, VECS, VEC, RESIDUAL>::kBlocks)
    rms_norm_backward_kernel(const __grid_constant__ RowInputs<T> in, Weight<T> w, const float* rstd, T* dx, float* partial, int64_t R, int C) {
  using Shape = BackwardShape<T, VECS, VEC, RESIDUAL>;
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ uint64_t full[Shape::kRing ? Shape::Ring::kStages : 1];
  __shared__ float sums[2][kRowThreads / 32];  // in turns
  using Rows = std::conditional_t<Shape::kRing, typename Shape::Ring, RowsInMemory<T, VEC>>;
  Rows rows(stages, full, in, R, C);
  float dw[VECS][8];
  float weights[VECS][8];  // where registers hold them; else they are read again where they are needed
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    if constexpr (Shape::kKeepsWeights) w.template load<VEC>(row_column(k), C, weights[k]);
#pragma unroll
    for (int j = 0; j < 8; ++j) dw[k][j] = 0.f;
  }
  auto weight_of = [&](int k) -> float(&)[8] {
    if constexpr (!Shape::kKeepsWeights) w.template load<VEC>(row_column(k), C, weights[k]);
    return weights[k];
  };
  float next_s = rstd[blockIdx.x];
  int turn = 0;
  for (int64_t r = blockIdx.x; r < R; r += gridDim.x) {
    const float s = next_s;
    if (r + gridDim.x < R) next_s = rstd[r + gridDim.x];
    Vec8<T> g[VECS], v[VECS];
    float dot = 0.f;
    rows.wait();
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
      rows.load(0, k, g[k]);
      rows.load(1, k, v[k]);
    }
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
      const auto& weight = weight_of(k);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float normalised = v[k].get(j) * s, grad = g[k].get(j);
        dw[k][j] = fmaf(grad, normalised, dw[k][j]);
        dot = fmaf(grad * weight[j], normalised, dot);
      }
    }
    const float total = block_sum_once(dot, sums[turn]);
    rows.refill(r);
    turn ^= 1;
    const float mean = total / C;
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
      const int c = row_column(k);
      if (c >= C) break;
      Vec8<T> out, more;
      if constexpr (RESIDUAL) rows.load(2, k, more);
      const auto& weight = weight_of(k);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        float d[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // fmaf by name: which products the compiler fuses changes with the code around them, and with it the last bit.
          const float gradient = fmaf(g[k].get(j + h), weight[j + h], -(v[k].get(j + h) * s * mean));
          d[h] = RESIDUAL ? fmaf(s, gradient, more.get(j + h)) : s * gradient;
        }
        out.set2(j, d[0], d[1]);
      }
      out.template store_n<VEC>(dx + r * C + c, C - c);
    }
    rows.advance();
  }
  ptx::let_next_kernel_start();
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    Vec8<float> sum;
#pragma unroll
    for (int j = 0; j < 8; j += 2) sum.set2(j, dw[k][j], dw[k][j + 1]);
    sum.store_n<VEC>(partial + static_cast<int64_t>(blockIdx.x) * C + row_column(k), C - row_column(k));
  }
}

// dw[c] = sum of partial[b, c]: 32 columns a block, a row of threads for every 32nd b, summed in a fixed order.
constexpr int kSumRows = 32;

__global__ void __launch_bounds__(32 * kSumRows) sum_partials_kernel(const float* partial, int blocks, float* dw, int C) {
  __shared__ float sm[kSumRows][33];
  const int c = blockIdx.x * 32 + threadIdx.x;
  float sum = 0.f;
  ptx::wait_for_previous_kernel();
  if (c < C) {
#pragma unroll 8
    for (int b = threadIdx.y; b < blocks; b += kSumRows) sum += partial[static_cast<int64_t>(b) * C + c];
  }
  sm[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && c < C) {
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < kSumRows; ++k) total += sm[k][threadIdx.x];
    dw[c] = total;
  }
}

template <typename T>
Weight<T> weight_of(const TensorView& w, const TensorView& x, int64_t C) {
  check_shape(w, "w", {C});
  check_contiguous(w, "w");
  check_same_device(w, x, "w");
  TE_CHECK(is_f32(w) || (w.dtype().code == x.dtype().code && w.dtype().bits == x.dtype().bits), "w must be float32 or have the dtype of x");
  return {pointer<const void>(w), is_f32(w)};
}

// A tensor beside x: its shape, dtype and device, contiguous.
void check_like(const TensorView& t, const char* name, const TensorView& x) {
  check_shape(t, name, {x.size(0), x.size(1)});
  check_contiguous(t, name);
  check_same_device(t, x, name);
  TE_CHECK(float_type(t, name) == float_type(x, "x"), name << " must have the dtype of x");
}

// Calls f(bool_constant).
template <typename F>
void with_flag(bool flag, F&& f) {
  if (flag) f(std::true_type{});
  else f(std::false_type{});
}

// residual and h: both or neither.
void forward(const TensorView& x, const TensorView* residual, const TensorView& w, const TensorView& y, const TensorView* h, const TensorView& rstd,
             double eps, const char* what) {
  const Launch l(x);
  const Type type = float_type(x, "x");
  const int64_t stride = row_stride(x, "x"), R = x.size(0), C = x.size(1);
  check_row_width(C);
  check_like(y, "y", x);
  if (residual) check_like(*residual, "residual", x), check_like(*h, "h", x);
  check_f32(rstd, "rstd");
  check_shape(rstd, "rstd", {R});
  check_same_device(rstd, x, "rstd");
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const auto weight = weight_of<T>(w, x, C);
    if (R == 0) return;
    const T* in = pointer<const T>(x);
    T* out = pointer<T>(y);
    const Residual<T> add{residual ? pointer<const T>(*residual) : nullptr, residual ? pointer<T>(*h) : nullptr};
    const bool ok = aligned(in, 16) && aligned(out, 16) && aligned(weight.p, 16) && aligned(add.p, 16) && aligned(add.h, 16) &&
                    stride * sizeof(T) % 16 == 0;
    with_vectors<T>(C, ok, [&](auto vecs, auto vec) {
      with_flag(residual != nullptr, [&](auto adds) {
        rms_norm_forward_kernel<T, vecs.value, vec.value, adds.value><<<static_cast<unsigned>(R), kRowThreads, 0, l.stream>>>(
            in, stride, add, weight, out, pointer<float>(rstd), static_cast<int>(C), static_cast<float>(eps));
      });
    });
  });
  TE_LAUNCHED(what);
}

template <typename T, int VECS, bool VEC, bool RESIDUAL>
void launch_backward(const Launch& l, const RowInputs<T>& in, const Weight<T>& w, const float* rstd, T* dx, float* dw, int64_t R, int64_t C) {
  using Shape = BackwardShape<T, VECS, VEC, RESIDUAL>;
  auto* kernel = rms_norm_backward_kernel<T, VECS, VEC, RESIDUAL>;
  static std::atomic<uint64_t> allowed;
  allow_shared_memory(kernel, Shape::kSmem, allowed);
  const int blocks = static_cast<int>(std::min<int64_t>(R, l.sms * Shape::kBlocks));
  const Scratch partial(l.device(), l.stream, sizeof(float) * blocks * C);
  kernel<<<blocks, kRowThreads, Shape::kSmem, l.stream>>>(in, w, rstd, dx, partial.as<float>(), R, static_cast<int>(C));
  launch_overlapping(l, sum_partials_kernel, static_cast<unsigned>(ceil_div(C, 32)), dim3(32, kSumRows), 0, partial.as<float>(), blocks, dw,
                     static_cast<int>(C));
}

// dh: null without a residual.
void backward(const TensorView& dy, const TensorView* dh, const TensorView& x, const TensorView& w, const TensorView& rstd, const TensorView& dx,
              const TensorView& dw, const char* what) {
  const Launch l(x);
  const Type type = float_type(x, "x");
  const int64_t stride = row_stride(x, "x"), dy_stride = row_stride(dy, "dy"), R = x.size(0), C = x.size(1);
  check_row_width(C);
  check_shape(dy, "dy", {R, C});
  TE_CHECK(float_type(dy, "dy") == type, "dy must have the dtype of x");
  check_like(dx, "dx", x);
  if (dh) check_like(*dh, "dh", x);
  check_f32(rstd, "rstd");
  check_shape(rstd, "rstd", {R});
  check_f32(dw, "dw");
  check_shape(dw, "dw", {C});
  for (const auto& [t, name] : {std::pair{dy, "dy"}, {rstd, "rstd"}, {dw, "dw"}}) check_same_device(t, x, name);
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const auto weight = weight_of<T>(w, x, C);
    if (R == 0) {
      cudaMemsetAsync(dw.data_ptr(), 0, C * 4, l.stream);
      return;
    }
    const T *in = pointer<const T>(x), *grad = pointer<const T>(dy), *more = dh ? pointer<const T>(*dh) : nullptr;
    const bool ok = aligned(in, 16) && aligned(weight.p, 16) && aligned(grad, 16) && aligned(more, 16) && aligned(pointer<T>(dx), 16) &&
                    stride * sizeof(T) % 16 == 0 && dy_stride * sizeof(T) % 16 == 0;
    with_vectors<T>(C, ok, [&](auto vecs, auto vec) {
      with_flag(dh != nullptr, [&](auto adds) {
        launch_backward<T, vecs.value, vec.value, adds.value>(l, {{grad, in, more}, {dy_stride, stride, C}}, weight, pointer<const float>(rstd),
                                                              pointer<T>(dx), pointer<float>(dw), R, C);
      });
    });
  });
  TE_LAUNCHED(what);
}

// x[R, C], w[C] -> y[R, C], rstd[R].
void rms_norm_forward(TensorView x, TensorView w, TensorView y, TensorView rstd, double eps) {
  forward(x, nullptr, w, y, nullptr, rstd, eps, "rms_norm_forward");
}
// x[R, C], residual[R, C], w[C] -> y[R, C], h[R, C], rstd[R].
void rms_norm_residual_forward(TensorView x, TensorView residual, TensorView w, TensorView y, TensorView h, TensorView rstd, double eps) {
  forward(x, &residual, w, y, &h, rstd, eps, "rms_norm_residual_forward");
}
// dy[R, C], x[R, C], w[C], rstd[R] -> dx[R, C], dw[C].
void rms_norm_backward(TensorView dy, TensorView x, TensorView w, TensorView rstd, TensorView dx, TensorView dw) {
  backward(dy, nullptr, x, w, rstd, dx, dw, "rms_norm_backward");
}
// dy[R, C], dh[R, C], h[R, C], w[C], rstd[R] -> dx[R, C] (of x and of the residual), dw[C].
void rms_norm_residual_backward(TensorView dy, TensorView dh, TensorView h, TensorView w, TensorView rstd, TensorView dx, TensorView dw) {
  backward(dy, &dh, h, w, rstd, dx, dw, "rms_norm_residual_backward");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_forward, te::rms_norm_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_residual_forward, te::rms_norm_residual_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_backward, te::rms_norm_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_residual_backward, te::rms_norm_residual_backward);
