#include "data/batch_copy.h"

#include <utility>

namespace potluck::data {
namespace {

/// Puts a new tensor of `device` in the place of `tensor` and starts copying its elements there.
CopyHandle send(Tensor& tensor, Device device) {
    if (!tensor.defined() || tensor.device() == device) return {};
    const Tensor from = std::exchange(tensor, Tensor::empty(tensor.shape(), {tensor.dtype(), device}));
    return copy_async(from, tensor);
}

}  // namespace

BatchCopy::BatchCopy(Batch batch, Device device) : batch_(std::move(batch)) {
    const Tensor& targets = batch_.targets;
    if (targets.defined() && targets.device().is_cpu() && targets.device() != device)
        batch_.host_targets = targets;
    inputs_ = send(batch_.inputs, device);
    targets_ = send(batch_.targets, device);
}

Batch BatchCopy::arrived() const {
    inputs_.wait_on();
    targets_.wait_on();
    return batch_;
}

}  // namespace potluck::data
