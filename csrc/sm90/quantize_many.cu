// quantize_many: entry point. All weights of a model in E4M3, in launches that do not grow with their number.
//
// Lists of one length: x[R, C] (rows may be apart), data[R, C], scale_inv as in check_quantize, stats[2]; data_t[C, R] and scale_inv_t, or
// empty lists; scale[1] (delayed scaling), or an empty list. Every tensor gets the bytes that quantize, quantize_transpose or
// quantize_with_scale would give it.
#include <tvm/ffi/container/array.h>

#include "quantize_host.h"
#include "quantize_many.cuh"

namespace te {
namespace {

using Tensors = ffi::Array<ffi::Tensor>;

void check_length(const Tensors& list, const char* name, size_t count, bool optional) {
  TE_CHECK(list.size() == count || (optional && list.empty()), name << " holds " << list.size() << " tensors, x holds " << count);
}

void quantize_many(Tensors x, Tensors scale, Tensors data, Tensors scale_inv, Tensors data_t, Tensors scale_inv_t, Tensors stats,
                   int64_t granularity, int64_t format, int64_t pow2) {
  TE_CHECK(!x.empty(), "x holds no tensor");
  TE_CHECK(format == kE4M3, "format " << format << " is not written by quantize_many (0 = e4m3, the format of weights)");
  const size_t count = x.size();
  check_length(scale, "scale", count, true);
  check_length(data, "data", count, false);
  check_length(scale_inv, "scale_inv", count, false);
  check_length(data_t, "data_t", count, true);
  check_length(scale_inv_t, "scale_inv_t", count, true);
  check_length(stats, "stats", count, false);
  const TensorView first = x[0];
  const Launch l(first);
  const Type type = float_type(first, "x");
  const int64_t size = first.dtype().bits / 8;
  const bool amax_arrays = granularity == kRow, from_stats = granularity == kTensor && scale.empty();
  std::vector<ManyTable> tables;
  auto optional = [](const Tensors& list, size_t i) {
    return list.empty() ? Optional<TensorView>() : Optional<TensorView>(TensorView(list[i]));
  };
  for (size_t i = 0; i < count; ++i) {
    const TensorView t = x[i];
    TE_CHECK(float_type(t, "x") == type, "x must hold tensors of one dtype; number " << i << " has another than number 0");
    check_same_device(t, first, "x");
    const QuantOutputs outputs{data[i], scale_inv[i], optional(data_t, i), optional(scale_inv_t, i), stats[i], optional(scale, i)};
    check_same_device(outputs.data, first, "data");
    ManyTensor one{};
    one.stride = row_stride(t, "x");
    one.q = check_quantize(outputs, t.size(0), t.size(1), granularity, format, pow2 != 0);
    one.q.write_stats = !amax_arrays && !from_stats;  // else the pass before the casts has written them
    if (amax_arrays) {
      one.q.row_amax = static_cast<const uint32_t*>(one.q.scale_inv);
      one.q.col_amax = static_cast<const uint32_t*>(one.q.scale_inv_t);
    }
    one.x = pointer<const void>(t);
    one.vec = rows_are_vectors(one.x, one.q.C, one.stride, size);
    if (i % ManyTable::kMost == 0) tables.emplace_back().transposed = !data_t.empty();
    tables.back().add(one);
  }
  for (const ManyTable& table : tables) {
    with_type(type, [&](auto tag) { launch_many<decltype(tag), kE4M3>(l, table, granularity); });
    TE_LAUNCHED("quantize_many");
  }
}

}  // namespace
}  // namespace te

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_many, te::quantize_many);
