#pragma once

// Internal: the names of element-wise ops, and their kernels' error messages for bad input, the same on every device.

#include <cstdint>

#include "core/error.h"
#include "core/kernel_specs.h"

namespace potluck {

/// "exp", "gelu": the names of the public functions.
const char* name_of(UnaryOp op);
const char* name_of(BinaryOp op);

/// The error for an op that is not defined for integers.
Error no_integer_version(UnaryOp op, DType dtype);
/// The error for an op whose gradient is composed of other ops.
Error no_fused_backward(UnaryOp op);
/// The error for a divisor of 0 or a negative exponent at a row-major position.
Error bad_integer_operand(BinaryOp op, std::int64_t position, std::int64_t value);
/// The error for an integer sum whose terms are scaled by a fraction.
Error no_integer_scale(double scale, DType dtype);

}  // namespace potluck
