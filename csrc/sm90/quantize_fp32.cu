// Quantise kernels for fp32 inputs (a file a dtype, so that they compile side by side).
#include "quantize.cuh"

namespace te {
void quantize_fp32(const Context& l, const void* x, int64_t stride, bool vec, const QuantArgs& q, int64_t granularity, int64_t format) {
  if (vec) quantize_source(l, PlainSource<float, true>{static_cast<const float*>(x), stride}, q, granularity, format);
  else quantize_source(l, PlainSource<float, false>{static_cast<const float*>(x), stride}, q, granularity, format);
}
}  // namespace te
