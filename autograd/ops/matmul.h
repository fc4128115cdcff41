#pragma once

#include "core/tensor.h"

namespace potluck {

/// Matrix product. (m, k) x (k, n); leading axes are batches and broadcast: (.., m, k) x (.., k, n) gives (.., m, n).
/// A vector on the left is treated as a row, on the right as a column, and that axis is dropped from the result.
/// Throws Error when the inner sizes differ.
Tensor matmul(const Tensor& a, const Tensor& b);

/// x weight^T + bias: x (.., in), weight (out, in), bias (out) or undefined; result (.., out).
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});

/// gelu(linear(x, weight, bias), GeluKind::tanh), which a device may compute in a fused kernel.
Tensor linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias);

}  // namespace potluck
