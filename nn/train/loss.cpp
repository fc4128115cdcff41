#include "nn/train/loss.h"

#include "autograd/grad_mode.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "core/dtype_policy.h"
#include "core/format.h"

namespace potluck {
namespace {

/// `loss` as a 0-dimensional tensor.
Tensor as_scalar(const Tensor& loss) {
    if (!loss.defined() || loss.count() != 1) {
        throw Error("loss",
                    fmt::format("the loss has shape {}. It must be one number: the mean over the targets, "
                                "or a LossSum.",
                                loss.defined() ? pretty(loss.shape()) : "none"));
    }
    if (!is_floating(loss.dtype()))
        throw Error("loss", fmt::format("the loss is {}. It must be floating.", loss.dtype()));
    return loss.ndim() == 0 ? loss : loss.reshape({});
}

}  // namespace

std::int64_t count_targets(const data::Batch& batch) {
    constexpr std::int64_t ignored = -100;
    if (!batch.targets.defined()) return batch.inputs.size(0);
    if (!is_integer(batch.targets.dtype())) return batch.targets.ndim() == 0 ? 1 : batch.targets.size(0);
    const NoGrad guard;
    const Tensor& targets = batch.host_targets.defined() ? batch.host_targets : batch.targets;
    return sum(targets != ignored).item<std::int64_t>();
}

LossFunction::LossFunction(nn::Module& module)
    : mean_([&module](const Tensor& inputs, const Tensor& targets) { return module.loss(inputs, targets); }) {
}

LossSum LossFunction::operator()(const Tensor& inputs, const Tensor& targets, std::int64_t count) const {
    if (mean_) {
        const Tensor mean = as_scalar(mean_(inputs, targets));
        // A sum over many targets exceeds the range and precision of a half type.
        return {mean.to(accumulation_dtype(mean.dtype())) * static_cast<double>(count), count};
    }
    if (!sum_) throw Error("loss", "the LossFunction holds no function. Give it one, or the module's own.");
    LossSum loss = sum_(inputs, targets);
    loss.sum = as_scalar(loss.sum);
    if (loss.count < 0) throw Error("loss", fmt::format("the count of a LossSum is {}.", loss.count));
    return loss;
}

}  // namespace potluck
