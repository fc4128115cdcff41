#pragma once

#include "core/tensor.h"

namespace potluck {

/// Selects rows of a table: weight (rows, width), ids (..) of i64 or i32; result (.., width).
/// Throws Error that names position and value of an id outside 0..rows-1.
Tensor embedding(const Tensor& weight, const Tensor& ids);

}  // namespace potluck
