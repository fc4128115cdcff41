#pragma once

#include <utility>

#include "core/random.h"
#include "core/tensor.h"

namespace potluck {

/// The k largest (or smallest) values along an axis, in order, and their indices (i64). Among equals the lower index
/// comes first. The gradient goes to the selected elements.
std::pair<Tensor, Tensor> topk(const Tensor& x, std::int64_t k, std::int64_t axis = -1, bool largest = true);
/// Draws indices with the given weights: weights (n) or (rows, n), not negative, not all 0; result (samples) or (rows,
/// samples) i64. Without replacement no index is drawn twice (Error when there are too few).
Tensor multinomial(const Tensor& weights, std::int64_t samples, bool replacement = false,
                   Generator* generator = nullptr);

}  // namespace potluck
