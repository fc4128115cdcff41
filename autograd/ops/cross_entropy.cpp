#include "autograd/ops/cross_entropy.h"

#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/softmax.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

void check(const Tensor& logits, const Tensor& labels, const CrossEntropy& options) {
    const char* name = "cross_entropy";
    detail::require_defined(name, logits, "the logits");
    detail::require_defined(name, labels, "the labels");
    detail::require_same_device(name, {logits, labels});
    detail::require_floating(name, logits, "the logits");
    detail::require_rank(name, logits, "the logits", 1);
    if (!is_integer(labels.dtype()))
        throw Error(name, fmt::format("the labels are {}, but class numbers (i64, i32 or u8) are needed.",
                                      labels.dtype()));
    if (labels.shape() != Shape(logits.shape().begin(), logits.shape().end() - 1))
        throw Error(
            name, fmt::format(
                      "logits {} need labels {}, but they are {}. The classes are the last axis of the "
                      "logits.",
                      pretty(logits.shape()), pretty(Shape(logits.shape().begin(), logits.shape().end() - 1)),
                      pretty(labels.shape())));
    if (!(options.label_smoothing >= 0.0 && options.label_smoothing <= 1.0))
        throw Error(
            name, fmt::format("label_smoothing is {}, but it must lie in [0, 1].", options.label_smoothing));
    if (logits.size(-1) == 0 && labels.count() > 0)
        throw Error(name, fmt::format("the logits {} have no classes.", pretty(logits.shape())));
}

/// The number of labels that are not ignored (at least 1, to avoid division by 0), as a tensor on the device.
Tensor count_of(const Tensor& labels, std::int64_t ignore_index, DType dtype) {
    const Tensor valid = labels != ignore_index;
    return clamp(sum(valid), 1.0, 0x1p62).to(dtype);
}

/// (rows, classes): d loss / d logits, composed of ops on the tape, for second derivatives.
Tensor composed_backward(const Tensor& logits, const Tensor& labels, const Tensor& dlosses,
                         const CrossEntropy& options) {
    const std::int64_t classes = logits.size(-1);
    const Tensor column = unsqueeze(labels, -1);
    const Tensor hit = equal(arange(0, classes, 1, {DType::i64, logits.device()}), column).to(logits.dtype());
    const double rest = classes == 0 ? 0.0 : options.label_smoothing / static_cast<double>(classes);
    const Tensor target = hit * (1.0 - options.label_smoothing) + rest;
    const Tensor slope = (softmax(logits) - target) * unsqueeze(dlosses, -1);
    return where(column != options.ignore_index, slope, detail::scalar_like(slope, 0));
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& given, const CrossEntropy& options) {
    const OpScope scope("cross_entropy");
    const bool follows = given.defined() && logits.defined() && given.device() == Device::cpu();
    const Tensor labels = follows ? given.to(logits.device()) : given;
    check(logits, labels, options);
    const Tensor rows = detail::as_rows(logits);  // (rows, classes)
    const Tensor ids = detail::reshaped(detail::cast(labels, DType::i64), {labels.count()});  // (rows)
    const DType dtype = accumulation_dtype(logits.dtype());
    const CrossEntropySpec kernel_options{options.ignore_index, options.label_smoothing};
    Tensor losses = Tensor::empty({labels.count()}, {dtype, logits.device()});
    Tensor logsumexp = Tensor::empty({labels.count()}, {dtype, logits.device()});
    backend(logits.device()).cross_entropy(rows, ids, kernel_options, losses, logsumexp);

    Tensor y, divisor;
    {
        const NoGrad guard;
        if (options.reduction == Reduction::none) y = reshape(losses, labels.shape());
        if (options.reduction != Reduction::none) y = sum(losses);
        if (options.reduction == Reduction::mean) {
            divisor = count_of(ids, options.ignore_index, dtype);
            y = y / divisor;
        }
    }
    return record("cross_entropy", y, {logits}, {logits, ids, logsumexp, divisor},
                  [options, kernel_options](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      // If nothing else refers to the logits, their gradient reuses their memory.
                      Tensor dlogits = saved.reusable(0);
                      const Tensor logits = saved[0], ids = saved[1], divisor = saved[3];
                      Tensor dlosses = divisor.defined() ? dy / divisor : dy;
                      dlosses = options.reduction == Reduction::none ? reshape(dlosses, ids.shape())
                                                                     : expand(dlosses, ids.shape());
                      if (is_grad_enabled()) {
                          const Tensor flat = reshape(logits, {ids.count(), logits.size(-1)});
                          return dx.add(
                              0, reshape(composed_backward(flat, ids, dlosses, options), logits.shape()));
                      }
                      if (!dlogits.defined() || !dlogits.is_contiguous())
                          dlogits = Tensor::empty(logits.shape(), {logits.dtype(), logits.device()});
                      Tensor target = detail::as_rows(dlogits);
                      backend(logits.device())
                          .cross_entropy_backward(detail::as_rows(logits), ids, saved[2], dlosses,
                                                  kernel_options, target);
                      dx.add(0, dlogits);
                  });
}

}  // namespace potluck
