#pragma once

#include <cstdint>
#include <string_view>

#include "core/tensor.h"

namespace potluck::cpu {

/// Throws Error(op, ...) that names position and value when an element of `indices` (an integer dtype) lies
/// outside [0, size). `what` says what they are ("id", "index"), `of_what` what they choose ("the 50257 rows
/// of the weight").
void check_indices(std::string_view op, std::string_view what, const Tensor& indices, std::int64_t size,
                   std::string_view of_what);

}  // namespace potluck::cpu
