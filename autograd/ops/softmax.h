#pragma once

#include "core/tensor.h"

namespace potluck {

/// exp(x) / sum(exp(x)) along an axis, without overflow. A slice that contains only -inf gives zeros.
Tensor softmax(const Tensor& x, std::int64_t axis = -1);
/// log(softmax(x)), computed directly. A slice that contains only -inf gives -inf.
Tensor log_softmax(const Tensor& x, std::int64_t axis = -1);

}  // namespace potluck
