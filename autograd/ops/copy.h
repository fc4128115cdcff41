#pragma once

#include "core/tensor.h"

namespace potluck {

/// The same values in row-major order: x itself if it is contiguous.
Tensor contiguous(const Tensor& x);
/// A row-major copy with its own memory.
Tensor clone(const Tensor& x);
/// Converts to a dtype; returns x itself if it has that dtype. Floating to integer truncates towards zero. The gradient
/// is converted back.
Tensor to(const Tensor& x, DType dtype);
/// Copies to a device; returns x itself if it is there.
Tensor to(const Tensor& x, Device device);

}  // namespace potluck
