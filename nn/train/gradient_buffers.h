#pragma once

// Internal: where the gradients of half-type parameters add up in a training.

#include <span>
#include <vector>

#include "core/tensor.h"

namespace potluck {

/// Gives every trained parameter of a half type that has no gradient buffer one in f32, so that sums over micro-batches are
/// not rounded to the half type. Returns the parameters that got one; who asked takes them away again.
std::vector<Tensor> add_gradient_buffers(std::span<const Tensor> parameters);

}  // namespace potluck
