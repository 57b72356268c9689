// Cross-entropy per token, FP32 inside. Tokens with label -100 have loss 0 and gradient exactly 0, whatever their logits hold.
#include "export.h"
#include "row_kernels.h"
#include "rows.h"
#include "tensor.h"

namespace te {
namespace {

constexpr int32_t kIgnored = -100;

void check_logits_and_labels(const TensorView& logits, const TensorView& labels) {
  check_rows(logits, "logits", 2, "[T, V]");
  check_device(labels, "labels", kDLCPU);
  check_dtype(labels, "labels", {DType::i32});
  check_shape(labels, "labels", {logits.size(0)}, "the tokens of logits");
  check_contiguous(labels, "labels");
  const int32_t* label = data<int32_t>(labels);
  for (int64_t t = 0; t < logits.size(0); ++t) {
    TE_CHECK(label[t] == kIgnored || (label[t] >= 0 && label[t] < logits.size(1)),
             "labels[" << t << "] is " << label[t] << "; expected 0 to " << logits.size(1) - 1 << ", or -100 for a token that does not count");
  }
}

int64_t label_or_none(const TensorView& labels, int64_t t) {
  const int32_t label = data<int32_t>(labels)[t];
  return label == kIgnored ? -1 : label;
}

}  // namespace

// logits[T, V], labels[T] i32 -> loss[T] f32, lse[T] f32 (log-sum-exp of each row)
void cross_entropy_forward(TensorView logits, TensorView labels, TensorView loss, TensorView lse) {
  check_logits_and_labels(logits, labels);
  check_f32(loss, "loss", {logits.size(0)}, "the tokens of logits");
  check_f32(lse, "lse", {logits.size(0)}, "the tokens of logits");
  const int64_t vocab = logits.size(1);
  for_row_bands(logits.size(0), vocab, [&](int64_t begin, int64_t count) {
    for (int64_t t = begin; t < begin + count; ++t) {
      TE_SIMD_CALL(cross_entropy_forward_row)(row_dtype(logits), row(logits, t), vocab, label_or_none(labels, t),
                                              data<float>(loss) + t, data<float>(lse) + t);
    }
  });
}

// dloss[T] f32, lse[T] of the forward -> dlogits[T, V] = dloss * (softmax - onehot), dtype of logits
void cross_entropy_backward(TensorView dloss, TensorView logits, TensorView labels, TensorView lse, TensorView dlogits) {
  check_logits_and_labels(logits, labels);
  check_f32(dloss, "dloss", {logits.size(0)}, "the tokens of logits");
  check_f32(lse, "lse", {logits.size(0)}, "the tokens of logits");
  check_same(dlogits, "dlogits", logits, "logits");
  const int64_t vocab = logits.size(1);
  for_row_bands(logits.size(0), vocab, [&](int64_t begin, int64_t count) {
    for (int64_t t = begin; t < begin + count; ++t) {
      TE_SIMD_CALL(cross_entropy_backward_row)(row_dtype(logits), data<float>(dloss)[t], row(logits, t), vocab,
                                               label_or_none(labels, t), data<float>(lse)[t], row(dlogits, t));
    }
  });
}

TE_EXPORT(cross_entropy_forward);
TE_EXPORT(cross_entropy_backward);

}  // namespace te
