#pragma once

// Internal: whether tensors share memory.

#include <vector>

#include "core/tensor.h"

namespace potluck::optim {

enum class Sharing { none, some, all };

/// How many elements two tensors share. `all`: the same elements in the same row-major order, with one dtype.
Sharing sharing_of(const Tensor& a, const Tensor& b);

/// The sum of the gradients of tensors that are the same elements, outside the tape; undefined when there is none.
Tensor gradient_of(const Tensor& parameter, const std::vector<Tensor>& aliases);

}  // namespace potluck::optim
