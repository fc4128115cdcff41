#pragma once

#include <vector>

#include "core/tensor.h"

namespace potluck {

/// Concatenates tensors along an existing axis; all other sizes must agree; dtypes are promoted. Error for an empty
/// list.
Tensor cat(const std::vector<Tensor>& tensors, std::int64_t axis = 0);
/// Stacks tensors of one shape along a new axis.
Tensor stack(const std::vector<Tensor>& tensors, std::int64_t axis = 0);

}  // namespace potluck
