// Gradient of SwiGLU + quantise: both halves of dx, row-major and transposed, from one read of dy and x.
#include "fused.cuh"

namespace te {

void dswiglu_quantize(const Context& l, const SwigluGradientSource& source, const QuantArgs& q, int64_t granularity, int64_t format) {
  quantize_all<true>(l, source, q, granularity, format, Before::kNothing);
}

}  // namespace te
