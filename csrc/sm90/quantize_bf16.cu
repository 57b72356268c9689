// Quantise kernels for bf16 inputs (a file a dtype, so that they compile side by side).
#include "quantize.cuh"

namespace te {
void quantize_bf16(const Context& l, const void* x, int64_t stride, bool vec, const QuantArgs& q, int64_t granularity, int64_t format) {
  if (vec) quantize_source(l, PlainSource<bf16, true>{static_cast<const bf16*>(x), stride}, q, granularity, format);
  else quantize_source(l, PlainSource<bf16, false>{static_cast<const bf16*>(x), stride}, q, granularity, format);
}
}  // namespace te
