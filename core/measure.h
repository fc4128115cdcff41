#pragma once

// Internal: numbers of many tensors of one device, read by the host in one wait.

#include <span>

#include "core/square_sums.h"
#include "core/tensor.h"

namespace potluck {

/// The sums of squares of all elements; norm_of() is their root. The tensors are floating and lie on one device.
SquareSums sum_of_squares(std::span<const Tensor> tensors);
/// The largest magnitude of all elements: NaN when there is one; 0 for none.
double largest_magnitude(std::span<const Tensor> tensors);

}  // namespace potluck
