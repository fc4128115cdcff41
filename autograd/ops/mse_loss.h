#pragma once

#include "autograd/ops/cross_entropy.h"
#include "core/tensor.h"

namespace potluck {

/// (prediction - target)^2, then the reduction. Shapes must be equal: broadcasting here is nearly always a mistake and
/// therefore an Error.
Tensor mse_loss(const Tensor& prediction, const Tensor& target, Reduction reduction = Reduction::mean);

}  // namespace potluck
