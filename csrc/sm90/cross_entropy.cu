// Cross-entropy over logits[T, V] with integer labels; label -100 gives loss 0 and gradient 0 and the row is not read.
//
// forward reads the logits once (running maximum and sum); backward reads them once and writes dlogits. A label outside [0, V)
// that is not -100 cannot be reported from the device without a synchronisation: its loss and its gradient are NaN.
#include "block_row.cuh"
#include "host.h"

namespace te {
namespace {

constexpr int kIgnore = -100;

struct MaxSum {
  float max, sum;
};
__device__ __forceinline__ MaxSum merge(MaxSum a, MaxSum b) {
  const float m = fmaxf(a.max, b.max);
  if (m == -INFINITY) return {m, a.sum + b.sum};  // nothing but -inf so far; a NaN in a sum stays
  return {m, a.sum * __expf(a.max - m) + b.sum * __expf(b.max - m)};
}

template <typename T, bool VEC>
__global__ void __launch_bounds__(kRowThreads) cross_entropy_forward_kernel(const T* logits, int64_t stride, const int* labels, float* loss, float* lse,
                                                                            int64_t V) {
  __shared__ MaxSum sm[kRowThreads / 32];
  const int64_t t = blockIdx.x;
  const int label = labels[t];
  if (label == kIgnore) {
    if (threadIdx.x == 0) loss[t] = 0.f, lse[t] = 0.f;
    return;
  }
  const T* row = logits + t * stride;
  MaxSum own{-INFINITY, 0.f};
  for (int64_t c = threadIdx.x * 8; c < V; c += kRowThreads * 8) {
    Vec8<T> v;
    v.template load_n<VEC>(row + c, V - c);
    const int n = VEC || V - c >= 8 ? 8 : static_cast<int>(V - c);
    float m = own.max;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < n) m = fmaxf(m, v.get(j));
    // exp of (x - m) with m = -inf would be NaN for a row that starts with -inf; 0 gives exp(-inf) = 0 and keeps NaN values.
    const float base = m == -INFINITY ? 0.f : m;
    float sum = own.max == -INFINITY ? own.sum : own.sum * __expf(own.max - base);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < n) sum += __expf(v.get(j) - base);
    own = {m, sum};
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    const MaxSum other{__shfl_xor_sync(0xffffffffu, own.max, d), __shfl_xor_sync(0xffffffffu, own.sum, d)};
    own = merge(own, other);
  }
  if ((threadIdx.x & 31) == 0) sm[threadIdx.x >> 5] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    MaxSum total = sm[0];
#pragma unroll
    for (int k = 1; k < kRowThreads / 32; ++k) total = merge(total, sm[k]);
    const float value = total.max + logf(total.sum);
    lse[t] = value;
    loss[t] = label >= 0 && label < V ? value - Elem<T>::to_float(row[label]) : __uint_as_float(0x7fc00000u);
  }
}

template <typename T, bool VEC>
__global__ void __launch_bounds__(kRowThreads) cross_entropy_backward_kernel(const float* dloss, const T* logits, int64_t stride, const int* labels,
                                                                             const float* lse, T* dlogits, int64_t V) {
  const int64_t t = blockIdx.y;
  const int64_t c = (blockIdx.x * static_cast<int64_t>(kRowThreads) + threadIdx.x) * 8;
  if (c >= V) return;
  const int label = labels[t];
  Vec8<T> out;
  out.zero();
  if (label != kIgnore) {
    const float grad = label >= 0 && label < V ? dloss[t] : __uint_as_float(0x7fc00000u), base = lse[t];
    Vec8<T> v;
    v.template load_n<VEC>(logits + t * stride + c, V - c);
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      out.set2(j, (__expf(v.get(j) - base) - (c + j == label ? 1.f : 0.f)) * grad,
               (__expf(v.get(j + 1) - base) - (c + j + 1 == label ? 1.f : 0.f)) * grad);
  }
  out.template store_n<VEC>(dlogits + t * V + c, V - c);
}

void check_inputs(const TensorView& logits, const TensorView& labels, const TensorView& lse) {
  check_i32(labels, "labels");
  check_shape(labels, "labels", {logits.size(0)});
  check_f32(lse, "lse");
  check_shape(lse, "lse", {logits.size(0)});
  check_same_device(labels, logits, "labels");
  check_same_device(lse, logits, "lse");
  TE_CHECK(logits.size(1) > 0, "logits need at least one column");
}

void cross_entropy_forward(TensorView logits, TensorView labels, TensorView loss, TensorView lse) {
  const Launch l(logits);
  const Type type = float_type(logits, "logits");
  const int64_t stride = row_stride(logits, "logits"), tokens = logits.size(0), V = logits.size(1);
  check_inputs(logits, labels, lse);
  check_f32(loss, "loss");
  check_shape(loss, "loss", {tokens});
  check_same_device(loss, logits, "loss");
  if (tokens == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const T* in = pointer<const T>(logits);
    const bool vec = V % 8 == 0 && aligned(in, 16) && stride * sizeof(T) % 16 == 0;
    auto kernel = vec ? cross_entropy_forward_kernel<T, true> : cross_entropy_forward_kernel<T, false>;
    kernel<<<static_cast<unsigned>(tokens), kRowThreads, 0, l.stream>>>(in, stride, pointer<const int>(labels), pointer<float>(loss), pointer<float>(lse), V);
  });
  TE_LAUNCHED("cross_entropy_forward");
}

void cross_entropy_backward(TensorView dloss, TensorView logits, TensorView labels, TensorView lse, TensorView dlogits) {
  const Launch l(logits);
  const Type type = float_type(logits, "logits");
  const int64_t stride = row_stride(logits, "logits"), tokens = logits.size(0), V = logits.size(1);
  check_inputs(logits, labels, lse);
  check_f32(dloss, "dloss");
  check_shape(dloss, "dloss", {tokens});
  check_same_device(dloss, logits, "dloss");
  check_shape(dlogits, "dlogits", {tokens, V});
  check_contiguous(dlogits, "dlogits");
  check_same_device(dlogits, logits, "dlogits");
  TE_CHECK(float_type(dlogits, "dlogits") == type, "dlogits must have the dtype of logits");
  if (tokens == 0) return;
  TE_CHECK(tokens <= 65535 * int64_t{1024}, "too many tokens: " << tokens);
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const T* in = pointer<const T>(logits);
    T* out = pointer<T>(dlogits);
    const bool vec = V % 8 == 0 && aligned(in, 16) && aligned(out, 16) && stride * sizeof(T) % 16 == 0;
    auto kernel = vec ? cross_entropy_backward_kernel<T, true> : cross_entropy_backward_kernel<T, false>;
    const unsigned columns = static_cast<unsigned>(ceil_div(V, kRowThreads * 8));
    for (int64_t first = 0; first < tokens; first += 65535) {  // gridDim.y ends at 65535
      const unsigned n = static_cast<unsigned>(std::min<int64_t>(65535, tokens - first));
      kernel<<<dim3(columns, n), kRowThreads, 0, l.stream>>>(pointer<const float>(dloss) + first, in + first * stride, stride, pointer<const int>(labels) + first,
                                                             pointer<const float>(lse) + first, out + first * V, V);
    }
  });
  TE_LAUNCHED("cross_entropy_backward");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cross_entropy_forward, te::cross_entropy_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cross_entropy_backward, te::cross_entropy_backward);
