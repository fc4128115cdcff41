#pragma once

#include "core/tensor.h"

namespace potluck {

/// The same values in row-major order: x itself when it already is.
Tensor contiguous(const Tensor& x);
/// A copy with memory of its own, row-major.
Tensor clone(const Tensor& x);
/// Converted to a dtype: x itself when it has it. Floating to integer cuts towards zero. The gradient is converted back.
Tensor to(const Tensor& x, DType dtype);
/// Copied to a device: x itself when it is there.
Tensor to(const Tensor& x, Device device);

}  // namespace potluck
