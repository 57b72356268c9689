// Quantise kernels for fp32 inputs (a file a dtype, so that they compile side by side).
#include "quantize.cuh"
#include "quantize_rows.cuh"

namespace te {

// map: null where the copy engine cannot read x.
void quantize_fp32(const Context& l, const void* x, int64_t stride, const CUtensorMap* map, const QuantArgs& q, int64_t granularity, int64_t format) {
  using T = float;
  if (granularity == kRow && !q.data_t && !q.used && q.C <= kMaxRowWidth) return quantize_rows(l, static_cast<const T*>(x), stride, map != nullptr, q, format);
  if (map) {
    const PlainTiles<T> tiles{{*map}};
    quantize_all<false>(l, PlainSource<T, true>{static_cast<const T*>(x), stride}, ByTiles<PlainTiles<T>>{tiles}, q, granularity, format, Before::kNothing);
  } else {
    const PlainSource<T, false> source{static_cast<const T*>(x), stride};
    quantize_all<false>(l, source, Direct<PlainSource<T, false>>{source}, q, granularity, format, Before::kNothing);
  }
}

}  // namespace te
