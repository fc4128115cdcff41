#pragma once

// Internal: whether tensors mean the same memory.

#include "core/tensor.h"

namespace potluck::optim {

enum class Sharing { none, some, all };

/// How many of their elements two tensors share. `all`: the same elements in the same row-major order, as one dtype.
Sharing sharing_of(const Tensor& a, const Tensor& b);

}  // namespace potluck::optim
