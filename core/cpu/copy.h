#pragma once

// The kernels of the copy family, which others call, too. See the contract, core/backend.h.

#include "core/scalar.h"
#include "core/tensor.h"

namespace potluck::cpu {

void copy(const Tensor& from, Tensor& to);
void fill(Tensor& to, const Scalar& value);

}  // namespace potluck::cpu
