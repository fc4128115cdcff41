#pragma once

#include "core/random_scope.h"
#include "core/tensor.h"

namespace potluck::detail {

/// Dropout with given random numbers: for ops that must draw the same mask again.
/// For .cpp files of autograd/ only.
Tensor dropout_by_numbers(const Tensor& x, double p, const MaskNumbers& numbers);

}  // namespace potluck::detail
