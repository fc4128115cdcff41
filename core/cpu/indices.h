#pragma once

#include <cstdint>
#include <string_view>

#include "core/tensor.h"

namespace potluck::cpu {

/// Throws Error(op, ...) that names position and value when an element of `indices` (an integer dtype) is outside [0,
/// size). `what` names the indices ("id", "index"), `of_what` what they select ("the 50257 rows of the weight").
void check_indices(std::string_view op, std::string_view what, const Tensor& indices, std::int64_t size,
                   std::string_view of_what);

}  // namespace potluck::cpu
