#pragma once

// Internal: products that no library computes.

#include "core/tensor.h"
#include "cuda/runtime.h"

namespace potluck::cuda {

/// y = a b or y += a b for i64, i32 and u8, exact modulo 2^bits: a (batch..., m, k), b (batch..., k, n) with any strides,
/// y (batch..., m, n) contiguous.
void integer_matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate, cudaStream_t stream);

}  // namespace potluck::cuda
