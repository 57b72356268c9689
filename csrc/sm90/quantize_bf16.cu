// Quantise kernels for bf16 inputs (a file a dtype, so that they compile side by side).
#include "quantize.cuh"
#include "quantize_rows.cuh"

namespace te {

// vectors: rows of x are vectors (rows_are_vectors).
void quantize_bf16(const Context& l, const void* x, int64_t stride, bool vectors, const QuantArgs& q, int64_t granularity, int64_t format) {
  using T = bf16;
  const T* p = static_cast<const T*>(x);
  if (granularity == kRow && !q.data_t && !q.used && q.C <= kMaxRowWidth) quantize_rows(l, p, stride, vectors, q, format);
  else if (vectors) quantize_all<false>(l, PlainSource<T, true>{p, stride}, q, granularity, format, Before::kNothing);
  else quantize_all<false>(l, PlainSource<T, false>{p, stride}, q, granularity, format, Before::kNothing);
}

}  // namespace te
