#pragma once

#include "core/random.h"
#include "core/tensor.h"

namespace potluck {

/// When training, sets each element to zero with probability p and scales the others by 1 / (1 - p); else returns x. p
/// = 0 is the identity, p = 1 gives zeros. The mask is not stored: backward draws the same numbers again. Within a
/// RandomUpdateScope (core/random_scope.h) the mask does not depend on how the global batch, axis 0 of x, is divided.
/// Throws Error for p outside [0, 1].
Tensor dropout(const Tensor& x, double p, bool training = true, Generator* generator = nullptr);

}  // namespace potluck
