// rope: rotary embedding (rope.cuh) of one tensor. qkv_rope: of the q and k in a QKV projection's output, which is split into q, k and v on
// the way; qkv_rope_backward joins their gradients. Each is one pass; a token's sines and cosines are made once for all its heads.
#include "rope.cuh"
#include "rope_host.h"

namespace te {
namespace {

constexpr int kHeadsAhead = 3;  // 128 threads hold 48 heads of 128: all of a token of llama3-8B at once

template <typename T, bool VEC, class From, class To>
__global__ void __launch_bounds__(kRopeThreads) rope_kernel(const __grid_constant__ Rotation r, const __grid_constant__ RopeShape shape,
                                                            const __grid_constant__ From from, const __grid_constant__ To to, int tokens) {
  extern __shared__ __align__(16) float table[];
  const int first = blockIdx.x * shape.tokens;
  rope_heads<T, VEC, kRopeThreads, kHeadsAhead>(
      r, shape, from,
      [&](int t, int h, int column, int n, const Vec8<T>& a, const Vec8<T>& b) {
        T* p = to.at(t, h) + column;
        a.template store_n<VEC>(p, n);
        b.template store_n<VEC>(p + r.D / 2, n);
      },
      table, first, min(first + shape.tokens, tokens));
}

template <typename T, class From, class To>
void launch_rope(const Launch& l, const Rotation& r, const From& from, const To& to, int64_t tokens) {
  const bool vec = r.D % 16 == 0 && vectors(from) && vectors(to);
  auto* kernel = vec ? rope_kernel<T, true, From, To> : rope_kernel<T, false, From, To>;
  const RopeShape shape(r, kRopeThreads);
  const unsigned grid = static_cast<unsigned>(ceil_div(tokens, shape.tokens));
  kernel<<<grid, kRopeThreads, shape.table_floats(r) * sizeof(float), l.stream>>>(r, shape, from, to, static_cast<int>(tokens));
}

void check_same_dtype(const TensorView& t, const TensorView& first, const char* name) {
  const bool same = t.dtype().code == first.dtype().code && t.dtype().bits == first.dtype().bits && t.dtype().lanes == 1;
  TE_CHECK(same, name << " must have the dtype of the input");
}

// x[T, H, D] -> y[T, H, D] contiguous. inverse: rotates back, which is the gradient.
void rope(TensorView x, TensorView positions, TensorView inv_freq, TensorView y, int64_t inverse) {
  const Launch l(x);
  const Type type = float_type(x, "x");
  check_heads(x, "x");
  const int64_t tokens = x.size(0), H = x.size(1), D = x.size(2);
  const Rotation r = check_rotation(x, positions, inv_freq, tokens, D, H, H, inverse != 0);
  check_shape(y, "y", {tokens, H, D});
  check_contiguous(y, "y");
  check_same_dtype(y, x, "y");
  check_same_device(y, x, "y");
  if (tokens == 0 || H == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    launch_rope<T>(l, r, heads_of<const T>(x), heads_of<T>(y), tokens);
  });
  TE_LAUNCHED("rope");
}

// qkv[T, (H + 2G) * D], rows may be apart -> q[T, H, D] and k[T, G, D] rotated, v[T, G, D], contiguous.
void qkv_rope(TensorView qkv, TensorView positions, TensorView inv_freq, TensorView q, TensorView k, TensorView v, int64_t layout) {
  const Launch l(qkv);
  const Type type = float_type(qkv, "qkv");
  const QkvLayout heads = check_qkv(q, k, v, qkv, {"q", "k", "v", "qkv"}, layout);
  const int64_t tokens = q.size(0), D = q.size(2);
  const Rotation r = check_rotation(qkv, positions, inv_freq, tokens, D, heads.H + 2 * heads.G, heads.H + heads.G, false);
  for (const auto& [t, name] : {std::pair{q, "q"}, {k, "k"}, {v, "v"}}) {
    check_contiguous(t, name);
    check_same_dtype(t, qkv, name);
    check_same_device(t, qkv, name);
  }
  if (tokens == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const QkvParts<T> parts{heads_of<T>(q), heads_of<T>(k), heads_of<T>(v), heads.H, heads.G};
    launch_rope<T>(l, r, rows_of<const T>(qkv, "qkv", D, heads), parts, tokens);
  });
  TE_LAUNCHED("qkv_rope");
}

// The gradient: dq[T, H, D], dk[T, G, D], dv[T, G, D] (rows and heads may be apart) -> dqkv[T, (H + 2G) * D] contiguous.
void qkv_rope_backward(TensorView dq, TensorView dk, TensorView dv, TensorView positions, TensorView inv_freq, TensorView dqkv, int64_t layout) {
  const Launch l(dq);
  const Type type = float_type(dq, "dq");
  const QkvLayout heads = check_qkv(dq, dk, dv, dqkv, {"dq", "dk", "dv", "dqkv"}, layout);
  const int64_t tokens = dq.size(0), D = dq.size(2);
  const Rotation r = check_rotation(dq, positions, inv_freq, tokens, D, heads.H + 2 * heads.G, heads.H + heads.G, true);
  check_contiguous(dqkv, "dqkv");
  for (const auto& [t, name] : {std::pair{dk, "dk"}, {dv, "dv"}, {dqkv, "dqkv"}}) {
    check_same_dtype(t, dq, name);
    check_same_device(t, dq, name);
  }
  if (tokens == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const QkvParts<const T> parts{heads_of<const T>(dq), heads_of<const T>(dk), heads_of<const T>(dv), heads.H, heads.G};
    launch_rope<T>(l, r, parts, rows_of<T>(dqkv, "dqkv", D, heads), tokens);
  });
  TE_LAUNCHED("qkv_rope_backward");
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope, te::rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(qkv_rope, te::qkv_rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(qkv_rope_backward, te::qkv_rope_backward);
