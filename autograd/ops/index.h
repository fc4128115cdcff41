#pragma once

#include "core/tensor.h"

namespace potluck {

/// result[.., i, ..] = x[.., index[.., i, ..], ..] along axis. index (i64) has the rank of x and no larger sizes in all
/// other axes.
Tensor gather(const Tensor& x, std::int64_t axis, const Tensor& index);
/// x plus source[.., i, ..] at [.., index[.., i, ..], ..] along axis; repeated indices accumulate. source has index's
/// shape.
Tensor scatter_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& source);
/// The lower triangle of the last two axes (column <= row + diagonal), zeros above.
Tensor tril(const Tensor& x, std::int64_t diagonal = 0);

}  // namespace potluck
