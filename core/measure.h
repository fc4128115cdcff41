#pragma once

// Internal: measurements over many tensors of one device, which the host reads with one wait.

#include <span>

#include "core/square_sums.h"
#include "core/tensor.h"

namespace potluck {

/// The sums of squares of all elements; norm_of() is their square root. The tensors are floating and on one device.
SquareSums sum_of_squares(std::span<const Tensor> tensors);
/// The largest magnitude of all elements: NaN if any is NaN; 0 if there are none.
double largest_magnitude(std::span<const Tensor> tensors);

}  // namespace potluck
