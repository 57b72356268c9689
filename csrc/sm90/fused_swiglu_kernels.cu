// SwiGLU + quantise.
#include "fused.cuh"

namespace te {

void swiglu_quantize(const Context& l, const SwigluSource& source, const SwigluTiles& tiles, const QuantArgs& q, int64_t granularity, int64_t format) {
  quantize_all<true>(l, source, ByTiles<SwigluTiles>{tiles}, q, granularity, format, Before::kNothing);
}

}  // namespace te
