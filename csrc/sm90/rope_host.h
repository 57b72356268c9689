// Host side of the rotary kernels: checks of what they share.
#pragma once
#include <cstdlib>

#include "host.h"
#include "rope.cuh"

namespace te {

// Checks positions[T] and inv_freq[D/2]; heads and `rotated` as in Rotation.
inline Rotation check_rotation(const TensorView& x, const TensorView& positions, const TensorView& inv_freq, int64_t T, int64_t D, int64_t heads,
                               int64_t rotated, bool inverse) {
  TE_CHECK(D > 0 && D % 2 == 0 && D <= kMaxRopeDim, "head dim " << D << " must be even and at most " << kMaxRopeDim);
  TE_CHECK(heads * D < (1 << 30) && T < (1 << 30), T << " tokens of " << heads << " heads are too many");
  check_i32(positions, "positions");
  check_shape(positions, "positions", {T});
  check_f32(inv_freq, "inv_freq");
  check_shape(inv_freq, "inv_freq", {D / 2});
  check_same_device(positions, x, "positions");
  check_same_device(inv_freq, x, "inv_freq");
  return {pointer<const int>(positions), pointer<const float>(inv_freq), static_cast<int>(D), static_cast<int>(heads), static_cast<int>(rotated), inverse};
}

inline void check_stride(int64_t stride, const char* name) {
  TE_CHECK(std::abs(stride) <= INT32_MAX, name << " has a stride of " << stride << ", past 32 bits; make it contiguous");
}

// [T, H, D] whose rows and heads may be apart.
inline void check_heads(const TensorView& x, const char* name) {
  TE_CHECK(x.ndim() == 3, name << " must be [T, heads, D], got " << shape_text(x));
  TE_CHECK(x.numel() == 0 || x.size(2) == 1 || x.stride(2) == 1, name << " must have innermost stride 1");
  for (int i = 0; i < 2; ++i)
    if (x.size(i) > 1) check_stride(x.stride(i), name);
}
template <typename T>
Heads<T> heads_of(const TensorView& x) {
  const int64_t H = x.size(1), D = x.size(2);
  return {pointer<T>(x), static_cast<int>(x.size(0) > 1 ? x.stride(0) : H * D), static_cast<int>(H > 1 ? x.stride(1) : D)};
}

template <typename T>
QkvRows<T> rows_of(const TensorView& x, const char* name, int64_t D, const QkvLayout& layout) {
  const int64_t stride = row_stride(x, name);
  check_stride(stride, name);
  return {pointer<T>(x), static_cast<int>(stride), static_cast<int>(D), layout};
}

template <typename T>
bool vectors(const Heads<T>& x) {
  return aligned(x.p, 16) && x.stride_t * sizeof(T) % 16 == 0 && x.stride_h * sizeof(T) % 16 == 0;
}
template <typename T>
bool vectors(const QkvRows<T>& x) {
  return aligned(x.p, 16) && x.stride_t * sizeof(T) % 16 == 0;
}
template <typename T>
bool vectors(const QkvParts<T>& x) {
  return vectors(x.q) && vectors(x.k) && vectors(x.v);
}

// Checks q[T, H, D], k[T, G, D], v[T, G, D] against rows[T, (H + 2G) * D]; names: of these four. layout: 0 split, 1 grouped
// (te_plugin.ops.qkv_rope.problem.LAYOUT_CODE).
inline QkvLayout check_qkv(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& rows, const char* const (&names)[4],
                           int64_t layout) {
  check_heads(q, names[0]);
  const int64_t T = q.size(0), H = q.size(1), D = q.size(2);
  check_shape(k, names[1], {T, -1, D});
  check_heads(k, names[1]);
  const int64_t G = k.size(1);
  check_shape(v, names[2], {T, G, D});
  check_heads(v, names[2]);
  TE_CHECK(H > 0 && G > 0 && H % G == 0, names[0] << " has " << H << " heads, which is not a multiple of the " << G << " of " << names[1]);
  check_shape(rows, names[3], {T, (H + 2 * G) * D});
  TE_CHECK(layout == 0 || layout == 1, "layout " << layout << " is unknown (0: split, 1: grouped)");
  return {static_cast<int>(H), static_cast<int>(G), layout ? static_cast<int>(H / G) : 0};
}

}  // namespace te
