#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace potluck {

/// Matrix product. (m, k) x (k, n); leading axes are batches and broadcast: (.., m, k) x (.., k, n) gives (.., m, n).
/// A vector on the left is treated as a row, on the right as a column, and that axis is dropped from the result.
/// Throws Error when the inner sizes differ.
Tensor matmul(const Tensor& a, const Tensor& b);

/// The shape in which the weight of a linear layer is kept: (out, in), or (in, out) as in the weights of GPT-2.
enum class WeightLayout : std::uint8_t { out_in, in_out };

/// x weight^T + bias, or x weight + bias for a weight (in, out): x (.., in), bias (out) or undefined; result (.., out).
/// The weight's gradient adds up in the memory of the leaf's gradient, in either layout. Throws Error when the sizes
/// do not match.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              WeightLayout layout = WeightLayout::out_in);

/// gelu(linear(x, weight, bias, layout), GeluKind::tanh), which a device may compute in a fused kernel.
Tensor linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                   WeightLayout layout = WeightLayout::out_in);

}  // namespace potluck
