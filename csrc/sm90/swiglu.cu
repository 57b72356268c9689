// SwiGLU: x = [gate | up] of shape [R, 2C], y = silu(gate) * up, FP32 inside. Eight columns a thread.
#include "host.h"
#include "swiglu.cuh"

namespace te {
namespace {

template <typename T, bool VEC>
__global__ void swiglu_forward_kernel(const T* x, int64_t stride, T* y, int64_t R, int64_t C) {
  const int64_t per_row = (C + 7) / 8;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < R * per_row; i += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    const int64_t r = i / per_row, c = i % per_row * 8;
    Vec8<T> gate, up, out;
    gate.template load_n<VEC>(x + r * stride + c, C - c);
    up.template load_n<VEC>(x + r * stride + C + c, C - c);
    swiglu(gate, up, out);
    out.template store_n<VEC>(y + r * C + c, C - c);
  }
}

template <typename T, bool VEC>
__global__ void swiglu_backward_kernel(const T* dy, int64_t dy_stride, const T* x, int64_t stride, T* dx, int64_t R, int64_t C) {
  const int64_t per_row = (C + 7) / 8;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < R * per_row; i += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    const int64_t r = i / per_row, c = i % per_row * 8;
    Vec8<T> grad, gate, up, d_gate, d_up;
    grad.template load_n<VEC>(dy + r * dy_stride + c, C - c);
    gate.template load_n<VEC>(x + r * stride + c, C - c);
    up.template load_n<VEC>(x + r * stride + C + c, C - c);
    swiglu_gradient(grad, gate, up, d_gate, d_up);
    d_gate.template store_n<VEC>(dx + r * 2 * C + c, C - c);
    d_up.template store_n<VEC>(dx + r * 2 * C + C + c, C - c);
  }
}

template <typename F>
void with_vec(bool vec, F&& f) {
  if (vec) f(std::true_type{});
  else f(std::false_type{});
}

unsigned grid_for(const Context& l, int64_t threads) {
  return static_cast<unsigned>(std::min<int64_t>(ceil_div(threads, 256), static_cast<int64_t>(l.sms) * 64));
}

void swiglu_forward(TensorView x, TensorView y) {
  const Launch l(x);
  const Type type = float_type(x, "x");
  const int64_t stride = row_stride(x, "x"), R = x.size(0), C = x.size(1) / 2;
  TE_CHECK(x.size(1) % 2 == 0, "x must be [R, 2C] = [gate | up]; " << x.size(1) << " columns are odd");
  check_shape(y, "y", {R, C});
  check_contiguous(y, "y");
  check_same_device(y, x, "y");
  TE_CHECK(float_type(y, "y") == type, "y must have the dtype of x");
  if (R == 0 || C == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const T* in = pointer<const T>(x);
    T* out = pointer<T>(y);
    with_vec(C % 8 == 0 && aligned(in, 16) && aligned(out, 16) && stride * sizeof(T) % 16 == 0, [&](auto vec) {
      swiglu_forward_kernel<T, vec.value><<<grid_for(l, R * ceil_div(C, 8)), 256, 0, l.stream>>>(in, stride, out, R, C);
    });
  });
  TE_LAUNCHED("swiglu_forward");
}

void swiglu_backward(TensorView dy, TensorView x, TensorView dx) {
  const Launch l(x);
  const Type type = float_type(x, "x");
  const int64_t stride = row_stride(x, "x"), dy_stride = row_stride(dy, "dy"), R = x.size(0), C = x.size(1) / 2;
  TE_CHECK(x.size(1) % 2 == 0, "x must be [R, 2C] = [gate | up]; " << x.size(1) << " columns are odd");
  check_shape(dy, "dy", {R, C});
  check_shape(dx, "dx", {R, 2 * C});
  check_contiguous(dx, "dx");
  check_same_device(dy, x, "dy");
  check_same_device(dx, x, "dx");
  TE_CHECK(float_type(dy, "dy") == type && float_type(dx, "dx") == type, "dy and dx must have the dtype of x");
  if (R == 0 || C == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const T *in = pointer<const T>(x), *grad = pointer<const T>(dy);
    T* out = pointer<T>(dx);
    const bool ok = C % 8 == 0 && aligned(in, 16) && aligned(grad, 16) && aligned(out, 16) && stride * sizeof(T) % 16 == 0 && dy_stride * sizeof(T) % 16 == 0;
    with_vec(ok, [&](auto vec) {
      swiglu_backward_kernel<T, vec.value><<<grid_for(l, R * ceil_div(C, 8)), 256, 0, l.stream>>>(grad, dy_stride, in, stride, out, R, C);
    });
  });
  TE_LAUNCHED("swiglu_backward");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu_forward, te::swiglu_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu_backward, te::swiglu_backward);
