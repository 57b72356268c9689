// SwiGLU + quantise.
#include "fused.cuh"

namespace te {

void swiglu_quantize(const Context& l, const SwigluSource& source, const QuantArgs& q, int64_t granularity, int64_t format) {
  quantize_all<true>(l, source, q, granularity, format, Before::kNothing);
}

}  // namespace te
