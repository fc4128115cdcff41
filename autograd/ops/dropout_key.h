#pragma once

#include "core/random.h"
#include "core/tensor.h"

namespace potluck::detail {

/// Dropout by a known stretch of random numbers: for ops that have to draw the same mask again.
/// For .cpp files of autograd/ only.
Tensor dropout_by_key(const Tensor& x, double p, RandomKey key);

}  // namespace potluck::detail
